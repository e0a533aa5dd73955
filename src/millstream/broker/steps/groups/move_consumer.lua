-- Deletes a consumer without losing its pending entries: they move to an heir, or the deletion is refused.
--
-- KEYS[1]  the stream; its group's consumers and pending list are what changes
-- ARGV     group, consumer, heir (empty: refuse if anything is pending)
-- Returns the number of entries moved, or {'PENDING', number} when it refused. Raises NOGROUP as XPENDING does.
--
-- Idle times and delivery counts go along. An entry that was deleted from the stream while it was pending has nothing
-- left to be worked on: XCLAIM drops it, and it is not counted.
local stream, group, consumer, heir = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local page = redis.call('XPENDING', stream, group, '-', '+', 1000, consumer)
if #page > 0 and heir == '' then
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
    local claimed = redis.call('XCLAIM', stream, group, heir, 0, entry[1],
      'IDLE', entry[3], 'RETRYCOUNT', entry[4], 'JUSTID')
    moved = moved + #claimed
  end
  page = redis.call('XPENDING', stream, group, '-', '+', 1000, consumer)
end
redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
return moved
