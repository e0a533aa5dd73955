-- One XADD or XACK as a script, so that it can be fenced.
-- KEYS[1]  the stream
-- ARGV     XADD or XACK, and its arguments after the key
-- Returns  the reply of the command
if ARGV[1] ~= 'XADD' and ARGV[1] ~= 'XACK' then
  return redis.error_reply('ERR write takes XADD and XACK')
end
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
