-- Makes a vanished group again, or moves it back. It never moves a group forward: that would skip entries.
-- KEYS[1]  the stream; it is made where it is absent
-- ARGV     group, the id after which it shall read
-- Answers  'made', 'moved' or 'kept'
local key, group, point = KEYS[1], ARGV[1], ARGV[2]
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
if not last then
  redis.call('XGROUP', 'CREATE', key, group, point, 'MKSTREAM')
  return 'made'
end
if before(point, last) then
  redis.call('XGROUP', 'SETID', key, group, point)
  return 'moved'
end
return 'kept'
