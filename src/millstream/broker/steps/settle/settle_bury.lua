-- Buries one delivery: the dead letter is written and the entry acknowledged, or neither.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  the dead-letter stream, in the same slot
-- ARGV     group, consumer, times delivered, id, then the dead letter's fields and values
-- Answers  the dead letter's id, or nil where this consumer does not hold the entry at that count any more
local key, dlq, group, me, times, id = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local held = redis.call('XPENDING', key, group, id, id, 1, me)[1]
if not held or held[4] ~= times then return false end
local letter = redis.call('XADD', dlq, '*', unpack(ARGV, 5))
redis.call('XACK', key, group, id)
return letter
