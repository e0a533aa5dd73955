-- Releases the lease of a stream if this member still has it. The number stays, so that the next one is greater.
-- KEYS[1]  owner record of the data stream
-- ARGV     the expected record, ttl_ms
-- Returns  1, or 0 if the record is another
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], string.match(ARGV[1], '^%d+') .. ' ', 'PX', ARGV[2])
return 1
