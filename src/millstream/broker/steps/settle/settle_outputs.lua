-- Publishes what handlers put out and acknowledges what they were given, message by message, in one step.
-- KEYS[1]   the stream: the pending list of its group
-- KEYS[2..] the streams that outputs go to, in the same slot
-- ARGV      group, consumer, then for each message: id, times delivered, number of outputs, and for each output:
--           which of KEYS, number of words, fields and values
-- Answers   for each message the ids of its outputs, or nil where this consumer does not hold it at that count
local key, group, me = KEYS[1], ARGV[1], ARGV[2]
-- A wrong type found half-way could not be rolled back: look before the first write.
for i = 2, #KEYS do
  local kind = redis.call('TYPE', KEYS[i])['ok']
  if kind ~= 'stream' and kind ~= 'none' then
    return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
  end
end
local answer, at = {}, 3
while at <= #ARGV do
  local id, times, outputs = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  at = at + 3
  local held = redis.call('XPENDING', key, group, id, id, 1, me)[1]
  local mine = held and held[4] == times
  local ids = {}
  for _ = 1, outputs do
    local target, words = KEYS[tonumber(ARGV[at])], tonumber(ARGV[at + 1])
    if mine then ids[#ids + 1] = redis.call('XADD', target, '*', unpack(ARGV, at + 2, at + 1 + words)) end
    at = at + 2 + words
  end
  if mine then
    redis.call('XACK', key, group, id)
    answer[#answer + 1] = ids
  else
    answer[#answer + 1] = false
  end
end
return answer
