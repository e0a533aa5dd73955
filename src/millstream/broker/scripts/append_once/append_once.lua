-- Begins with append_once/_marker.lua
-- Appends a writer's rows and moves its marker atomically, if the marker is at the expected position.
--
-- KEYS[1]  the stream; entries are added at its end
-- KEYS[2]  the writer's markers
-- ARGV     see _marker.lua; then the number of arguments of a trim policy, those arguments,
--          and for each row: its number of arguments, those arguments
--
-- Returns {'OK', id...}, or a refusal of _marker.lua.
local refusal = check() or exhausted
if refusal then return refused(refusal) end

local trim_count = tonumber(argv[7])
local at = 8 + trim_count
local reply = { 'OK' }
while at <= #argv do
  local count = tonumber(argv[at])
  last = call('XADD', stream, '*', unpack(argv, at + 1, at + count))
  reply[#reply + 1] = last
  at = at + count + 1
end
move(#reply - 1)
if trim_count > 0 then
  call('XTRIM', stream, unpack(argv, 8, 7 + trim_count))
end
return reply
