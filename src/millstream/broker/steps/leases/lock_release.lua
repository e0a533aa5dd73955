-- Removes a lock, if it is still this member's.
-- KEYS[1]  the lock: a string that holds its owner's name
-- ARGV     member
-- Answers  1, or 0 when the lock is somebody else's or gone
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
