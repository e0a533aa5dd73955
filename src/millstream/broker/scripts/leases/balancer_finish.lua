-- Acknowledges and deletes an announcement if it is still pending for this member.
-- KEYS[1]  the load-balancer stream
-- ARGV     group, member, the entry's id
-- Returns  1, or 0 if the entry is pending for another member or was deleted
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #pending == 0 then
  return 0
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
return 1
