-- Begins with parts/once.lua
-- append_once for rows with the same fields in all of them: names travel once, and of the ids only the last comes back.
--
-- KEYS[1]  the stream; entries are added at its end
-- KEYS[2]  the writer's markers
-- ARGV     as parts/once.lua says; then number of names, those names, and for each row its values in the names' order
--
-- Returns {'OK', number of rows, last id}, or a refusal of parts/once.lua.
if exhausted then return exhausted end

local width = tonumber(argv[7])
local first = 8 + width
if width == 1 then
  local name = argv[8]
  for at = first, #argv do
    last = call('XADD', stream, '*', name, argv[at])
  end
else
  local words = { stream, '*' }
  for i = 1, width do words[2 * i + 1] = argv[7 + i] end
  for at = first, #argv, width do
    for i = 1, width do words[2 * i + 2] = argv[at + i - 1] end
    last = call('XADD', unpack(words))
  end
end
local count = (#argv - first + 1) / width
move(count)
return { 'OK', string.format('%.0f', count), last }
