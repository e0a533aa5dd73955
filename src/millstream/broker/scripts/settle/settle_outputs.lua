-- Publishes the outputs of handlers and acknowledges their messages, message by message.
-- KEYS[1]   the stream: the pending list of its group
-- KEYS[2..] the streams of the outputs, in the same slot
-- ARGV      group, consumer, then for each message: id, times delivered, number of outputs, and for each output:
--           its index in KEYS, number of arguments, fields and values
-- Returns   for each message the ids of its outputs, or nil if this consumer does not own it with that count
local key, group, me = KEYS[1], ARGV[1], ARGV[2]
-- Check the types before the first write, because a script does not roll back.
for i = 2, #KEYS do
  local kind = redis.call('TYPE', KEYS[i])['ok']
  if kind ~= 'stream' and kind ~= 'none' then
    return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
  end
end
local reply, at = {}, 3
while at <= #ARGV do
  local id, times, outputs = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  at = at + 3
  local pending = redis.call('XPENDING', key, group, id, id, 1, me)[1]
  local owned = pending and pending[4] == times
  local ids = {}
  for _ = 1, outputs do
    local target, size = KEYS[tonumber(ARGV[at])], tonumber(ARGV[at + 1])
    if owned then ids[#ids + 1] = redis.call('XADD', target, '*', unpack(ARGV, at + 2, at + 1 + size)) end
    at = at + 2 + size
  end
  if owned then
    redis.call('XACK', key, group, id)
    reply[#reply + 1] = ids
  else
    reply[#reply + 1] = false
  end
end
return reply
