-- Acknowledges entries, but only those that the given consumer owns at this moment.
--
-- KEYS[1]  the stream; its group's pending list is what changes
-- ARGV     group, consumer, id...
-- Returns the number of entries acknowledged. Raises NOGROUP as XPENDING does.
local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local acked = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  if #redis.call('XPENDING', stream, group, id, id, 1, consumer) > 0 then
    acked = acked + redis.call('XACK', stream, group, id)
  end
end
return acked
