-- A worker declares its retention policy for a stream, and takes or renews the lease of the worker that applies it.
-- KEYS[1]  retention record: hash. 'worker <id>' -> 'until_ms policy'; 'group <name>' -> 'until_ms'
-- KEYS[2]  housekeeping lease: string 'number worker', for one worker at a time
-- KEYS[3]  the stream
-- ARGV     worker, policy, declared_ms (0: the worker leaves), lease_ms, then its groups
-- Returns  {its lease or empty, {other worker, its policy, ...} if they differ, {declared groups that are missing}}
local worker, policy, lease_ms = ARGV[1], ARGV[2], ARGV[4]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('GET', KEYS[2])
local is_mine = lease and string.match(lease, '^%d+ (.*)$') == worker
if ARGV[3] == '0' then
  redis.call('HDEL', KEYS[1], 'worker ' .. worker)
  if is_mine then redis.call('DEL', KEYS[2]) end
  return {'', {}, {}}
end
-- First what can fail: a key of another type must not leave a record without a time to live.
local known = {}
if redis.call('EXISTS', KEYS[3]) == 1 then
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[3])) do
    for i = 1, #flat, 2 do
      if flat[i] == 'name' then known[flat[i + 1]] = true end
    end
  end
end

local till = string.format('%.0f', now + tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'worker ' .. worker, till .. ' ' .. policy)
for i = 5, #ARGV do redis.call('HSET', KEYS[1], 'group ' .. ARGV[i], till) end
local others, missing = {}, {}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local kind, name = string.match(fields[i], '^(%a+) (.*)$')
  local ends, declared = string.match(fields[i + 1], '^(%d+) ?(.*)$')
  if not ends or tonumber(ends) <= now then
    redis.call('HDEL', KEYS[1], fields[i])
  elseif kind == 'group' and not known[name] then
    missing[#missing + 1] = name
  elseif kind == 'worker' and name ~= worker and declared ~= policy then
    others[#others + 1] = name
    others[#others + 1] = declared
  end
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end

if is_mine then
  redis.call('PEXPIRE', KEYS[2], lease_ms)
elseif lease then
  -- Far more than a lease: the server's clock was set back.
  if redis.call('PTTL', KEYS[2]) > 10 * tonumber(lease_ms) then redis.call('PEXPIRE', KEYS[2], lease_ms) end
  return {'', others, missing}
else
  lease = string.format('%.0f', now) .. ' ' .. worker
  redis.call('SET', KEYS[2], lease, 'PX', lease_ms)
end
return {lease, others, missing}
