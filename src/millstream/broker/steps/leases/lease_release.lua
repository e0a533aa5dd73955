-- Gives the lease of a stream back, if it is still this member's. The number stays, so that the next one is greater.
-- KEYS[1]  owner record beside the data stream
-- ARGV     the record that must be there, ttl_ms
-- Answers  1, or 0 when the record is another
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], string.match(ARGV[1], '^%d+') .. ' ', 'PX', ARGV[2])
return 1
