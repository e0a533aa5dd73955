-- Ends an announcement, if its entry is still handed to this member: acknowledged and deleted, in one step.
-- KEYS[1]  the load-balancer stream
-- ARGV     group, member, the entry's id
-- Answers  1, or 0 when the entry is somebody else's or gone
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #pending == 0 then
  return 0
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
return 1
