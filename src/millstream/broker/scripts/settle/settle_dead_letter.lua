-- Writes a dead letter and acknowledges the entry, or does neither.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  the dead-letter stream, in the same slot
-- ARGV     group, consumer, times delivered, id, then the dead letter's fields and values
-- Returns  the dead letter's id, or nil if this consumer does not own the entry with that count any more
local key, dlq, group, me, times, id = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local pending = redis.call('XPENDING', key, group, id, id, 1, me)[1]
if not pending or pending[4] ~= times then return false end
local dead_letter_id = redis.call('XADD', dlq, '*', unpack(ARGV, 5))
redis.call('XACK', key, group, id)
return dead_letter_id
