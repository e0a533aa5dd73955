-- Begins with append_unique/_seen.lua
-- Appends entries whose event ids were not appended in this window or the previous one.
--
-- KEYS[1]     the stream; entries are added at its end
-- KEYS[2..4]  the event ids, see _seen.lua
-- ARGV        the window in ms, number of arguments of a trim policy, those arguments,
--             and for each entry: its event id, its number of arguments, those arguments
-- Returns for each entry its id, or false if the event id was appended before.
local stream = KEYS[1]

-- Check everything that can fail before the first write: a script does not roll back.
local kind = redis.call('TYPE', stream)['ok']
if kind ~= 'none' and kind ~= 'stream' then
  return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
end
if kind == 'stream' then
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' and info[i + 1]:sub(1, 21) == '18446744073709551615-' then
      return redis.error_reply('ERR The stream has exhausted the last possible ID, unable to add more items')
    end
  end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
open_window(now)

local trim_count = tonumber(ARGV[2])
local at = 3 + trim_count
local reply = {}
while at <= #ARGV do
  local event, count = ARGV[at], tonumber(ARGV[at + 1])
  if is_new(event) then
    reply[#reply + 1] = redis.call('XADD', stream, '*', unpack(ARGV, at + 2, at + 1 + count))
  else
    reply[#reply + 1] = false
  end
  at = at + count + 2
end
keep_window()
if trim_count > 0 then
  redis.call('XTRIM', stream, unpack(ARGV, 3, 2 + trim_count))
end
return reply
