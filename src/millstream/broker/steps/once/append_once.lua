-- Begins with once/_marker.lua
-- Appends a writer's rows and moves its marker, in one step, if the marker is where the writer believes it to be.
--
-- KEYS[1]  the stream; entries are added at its end
-- KEYS[2]  the writer's markers
-- ARGV     as _marker.lua says; then number of words of a trim policy, those words,
--          and for each row: its number of words, those words
--
-- Returns {'OK', id...}, or a refusal of _marker.lua.
local refusal = check() or exhausted
if refusal then return refused(refusal) end

local words = tonumber(argv[7])
local at = 8 + words
local answer = { 'OK' }
while at <= #argv do
  local count = tonumber(argv[at])
  last = call('XADD', stream, '*', unpack(argv, at + 1, at + count))
  answer[#answer + 1] = last
  at = at + count + 1
end
move(#answer - 1)
if words > 0 then
  call('XTRIM', stream, unpack(argv, 8, 7 + words))
end
return answer
