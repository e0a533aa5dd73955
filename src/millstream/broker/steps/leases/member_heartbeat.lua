-- A member of a service says that it is alive, and learns who else is.
-- KEYS[1]  members: hash, member -> "expires_ms owned capacity", times being this server's
-- KEYS[2]  the load-balancer stream, for the number of streams that are announced
-- ARGV     member, lease_ms (0 leaves), owned, capacity, ttl_ms of the table, forget_ms after which a dead row goes
-- Answers  now_ms, length of the load-balancer stream, then member and row in turn
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ARGV[2] == '0' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  local expires = string.format('%.0f', now + tonumber(ARGV[2]))
  redis.call('HSET', KEYS[1], ARGV[1], expires .. ' ' .. ARGV[3] .. ' ' .. ARGV[4])
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
local rows = redis.call('HGETALL', KEYS[1])
local answer = {now, redis.call('XLEN', KEYS[2])}
for i = 1, #rows, 2 do
  local expires = tonumber(string.match(rows[i + 1], '^%d+'))
  if expires + tonumber(ARGV[6]) < now then
    redis.call('HDEL', KEYS[1], rows[i])
  else
    answer[#answer + 1] = rows[i]
    answer[#answer + 1] = rows[i + 1]
  end
end
return answer
