-- Renews the membership of a member of a service and returns all members.
-- KEYS[1]  members: hash, member -> "expires_ms owned capacity lease_ms", by this server's clock
-- KEYS[2]  the load-balancer stream, for the number of announced streams
-- ARGV     member, lease_ms (0 leaves), owned, capacity, ttl_ms of the table, forget_ms after which a dead row is deleted
-- Returns  now_ms, length of the load-balancer stream, then member and row in turn
-- A row that expires later than one lease from now was written before the server's clock was set back. Its expiry is set
-- to one lease from now: a live member renews it, and a dead one expires after its lease, not after the clock caught up.
-- A row of another form was not written by a member: it is returned as it is.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ARGV[2] == '0' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  local expires = string.format('%.0f', now + tonumber(ARGV[2]))
  redis.call('HSET', KEYS[1], ARGV[1], expires .. ' ' .. ARGV[3] .. ' ' .. ARGV[4] .. ' ' .. ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
local rows = redis.call('HGETALL', KEYS[1])
local reply = {now, redis.call('XLEN', KEYS[2])}
for i = 1, #rows, 2 do
  local expires, lease = string.match(rows[i + 1], '^(%d+) .* (%d+)$')
  expires, lease = tonumber(expires), tonumber(lease)
  if expires and expires > now + lease then
    expires = now + lease
    rows[i + 1] = string.format('%.0f', expires) .. string.match(rows[i + 1], ' .*$')
    redis.call('HSET', KEYS[1], rows[i], rows[i + 1])
  end
  if expires and expires + tonumber(ARGV[6]) < now then
    redis.call('HDEL', KEYS[1], rows[i])
  else
    reply[#reply + 1] = rows[i]
    reply[#reply + 1] = rows[i + 1]
  end
end
return reply
