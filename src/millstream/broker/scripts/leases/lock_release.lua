-- Deletes a lock if this member still has it.
-- KEYS[1]  the lock: a string that holds its owner's name
-- ARGV     member
-- Returns  1, or 0 if another member has the lock or it was deleted
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
