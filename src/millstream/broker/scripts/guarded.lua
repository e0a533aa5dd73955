-- Writes to a stream, if the owner record says so: a stale owner cannot.
-- KEYS[1]  owner record beside the data stream
-- KEYS[2]  the stream that is written to, in the same slot
-- ARGV     the record that must be there, then XADD or XACK and its words after the key
-- Answers  what the command answers, or the error STALEOWNER
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('STALEOWNER the owner record is another')
end
local name = ARGV[2]
if name ~= 'XADD' and name ~= 'XACK' then
  return redis.error_reply('ERR guarded takes XADD and XACK')
end
return redis.call(name, KEYS[2], unpack(ARGV, 3))
