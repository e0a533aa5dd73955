-- Begins with unique/_seen.lua
-- Appends entries whose event ids were not seen in this window or the one before.
--
-- KEYS[1]     the stream; entries are added at its end
-- KEYS[2..4]  the event ids that were seen, as _seen.lua says
-- ARGV        the window in ms, number of words of a trim policy, those words,
--             and for each entry: its event id, its number of words, those words
-- Returns for each entry its id, or false where the event had been seen.
local stream = KEYS[1]

-- What could fail half-way is looked at before the first write: a script does not roll back.
local kind = redis.call('TYPE', stream)['ok']
if kind ~= 'none' and kind ~= 'stream' then
  return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
end
if kind == 'stream' then
  local facts = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' and facts[i + 1]:sub(1, 21) == '18446744073709551615-' then
      return redis.error_reply('ERR The stream has exhausted the last possible ID, unable to add more items')
    end
  end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
open_window(now)

local words = tonumber(ARGV[2])
local at = 3 + words
local answer = {}
while at <= #ARGV do
  local event, count = ARGV[at], tonumber(ARGV[at + 1])
  if is_new(event) then
    answer[#answer + 1] = redis.call('XADD', stream, '*', unpack(ARGV, at + 2, at + 1 + count))
  else
    answer[#answer + 1] = false
  end
  at = at + count + 2
end
keep_window()
if words > 0 then
  redis.call('XTRIM', stream, unpack(ARGV, 3, 2 + words))
end
return answer
