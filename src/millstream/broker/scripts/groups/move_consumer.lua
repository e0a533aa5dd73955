-- Deletes a consumer without losing its pending entries: they are moved to a new owner, or the deletion is refused.
--
-- KEYS[1]  the stream; the consumers and the pending list of its group are changed
-- ARGV     group, consumer, new owner (empty: refuse if entries are pending)
-- Returns the number of entries moved, or {'PENDING', number} if it refused. Raises NOGROUP as XPENDING does.
--
-- Idle times and delivery counts are kept. A pending entry that was deleted from the stream cannot be processed any more:
-- XCLAIM drops it, and it is not counted.
local stream, group, consumer, new_owner = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local page = redis.call('XPENDING', stream, group, '-', '+', 1000, consumer)
if #page > 0 and new_owner == '' then
  local pending = 0
  for _, owner in ipairs(redis.call('XPENDING', stream, group)[4]) do
    if owner[1] == consumer then
      pending = tonumber(owner[2])
    end
  end
  return { 'PENDING', pending }
end
local moved = 0
while #page > 0 do
  for _, entry in ipairs(page) do
    local claimed = redis.call('XCLAIM', stream, group, new_owner, 0, entry[1],
      'IDLE', entry[3], 'RETRYCOUNT', entry[4], 'JUSTID')
    moved = moved + #claimed
  end
  page = redis.call('XPENDING', stream, group, '-', '+', 1000, consumer)
end
redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
return moved
