-- Makes a vanished group again, or moves it back. It never moves a group forward: that would skip entries.
-- KEYS[1]  the stream; it is made where it is absent
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for another delivery, scored by when (ms)
-- KEYS[3]  {stream}.made:<group>: string, there for a while after the group was made again
-- ARGV     group, the id after which it shall read, how long that is told (ms)
-- Answers  'made', 'moved' or 'kept'
-- Entries that wait for another delivery vanished with the group, and no member holds them: this set alone knows them.
-- They are read again. Left in the set, they would be taken at their time from whoever is at work on them then.
local key, due, made, group, point = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
-- Numbers of 64 bits do not fit a Lua number: compare the digits.
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
    local facts = {}
    for j = 1, #groups[i], 2 do facts[groups[i][j]] = groups[i][j + 1] end
    if facts['name'] == group then last = facts['last-delivered-id'] end
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
  -- A member that reads on without having met the loss must hear of it: what it held is pending nowhere.
  redis.call('SET', made, '1', 'PX', ARGV[3])
  return 'made'
end
if before(point, last) then
  redis.call('XGROUP', 'SETID', key, group, point)
  return 'moved'
end
return 'kept'
