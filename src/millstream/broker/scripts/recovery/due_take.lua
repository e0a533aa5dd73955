-- Delivers entries that are due for redelivery; each delivery is counted.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for redelivery, scored by due time (ms)
-- ARGV     group, consumer, maximum number of entries, maximum number of bytes
-- Returns  {{id, fields, times delivered} each, ms until the next one is due (-1: there is none),
--           ids that are pending but deleted: XCLAIM removed them from the pending list}
-- An entry that is not pending any more was settled meanwhile: it is only removed from the sorted set.
local key, due, group, me, bytes = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken, gone = {}, {}
local ids = redis.call('ZRANGEBYSCORE', due, '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[3])
for i = 1, #ids do
  if bytes <= 0 then break end
  local pending = redis.call('XPENDING', key, group, ids[i], ids[i], 1)[1]
  redis.call('ZREM', due, ids[i])
  -- XNACK FATAL sets a count that a Lua number does not hold exactly.
  local count = pending and math.min(pending[4], 9007199254740991) + 1
  local text = count and string.format('%.0f', count)
  local entry = pending and redis.call('XCLAIM', key, group, me, 0, ids[i], 'RETRYCOUNT', text)[1]
  if entry then
    taken[#taken + 1] = {ids[i], entry[2], count}
    for j = 1, #entry[2] do bytes = bytes - #entry[2][j] end
  elseif pending then
    gone[#gone + 1] = ids[i]
  end
end
local next = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
if #next == 0 then return {taken, -1, gone} end
return {taken, math.max(0, tonumber(next[2]) - now), gone}
