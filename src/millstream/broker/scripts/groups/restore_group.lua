-- Recreates a deleted group, or moves it back. It never moves a group forward, which would skip entries.
-- KEYS[1]  the stream; created if it does not exist
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for redelivery, scored by due time (ms)
-- KEYS[3]  {stream}.made:<group>: string, exists for a while after the group was recreated
-- ARGV     group, the id after which it must read, how long KEYS[3] exists (ms)
-- Returns  'made', 'moved' or 'kept'
-- Entries that wait for redelivery were lost with the group; no consumer has them in flight, and only the due set has
-- their ids. The group reads them again. If they stayed in the due set, they would later be taken from the consumer that
-- is processing them then.
local key, due, made, group, point = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
-- Ids are compared as strings of digits, because a Lua number cannot hold every sequence number exactly.
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
local function before(a, b)
  local ams, aseq = string.match(a, '^(%d+)-(%d+)$')
  local bms, bseq = string.match(b, '^(%d+)-(%d+)$')
  if ams ~= bms then return less(ams, bms) end
  return less(aseq, bseq)
end
local last = nil
if redis.call('EXISTS', key) == 1 then
  local groups = redis.call('XINFO', 'GROUPS', key)
  for i = 1, #groups do
    local info = {}
    for j = 1, #groups[i], 2 do info[groups[i][j]] = groups[i][j + 1] end
    if info['name'] == group then last = info['last-delivered-id'] end
  end
end
local oldest = nil
local waiting = redis.call('ZRANGE', due, 0, -1)
for i = 1, #waiting do
  local id = waiting[i]
  if not last or #redis.call('XPENDING', key, group, id, id, 1) == 0 then
    redis.call('ZREM', due, id)
    if not oldest or before(id, oldest) then oldest = id end
  end
end
if oldest then
  local earlier = redis.call('XREVRANGE', key, '(' .. oldest, '-', 'COUNT', 1)[1]
  local start = earlier and earlier[1] or '0-0'
  if before(start, point) then point = start end
end
if not last then
  redis.call('XGROUP', 'CREATE', key, group, point, 'MKSTREAM')
  -- A consumer that did not notice the deletion must learn of it: its in-flight entries are pending nowhere.
  redis.call('SET', made, '1', 'PX', ARGV[3])
  return 'made'
end
if before(point, last) then
  redis.call('XGROUP', 'SETID', key, group, point)
  return 'moved'
end
return 'kept'
