-- One XADD or XACK as a script, so that it can stand behind a guard.
-- KEYS[1]  the stream
-- ARGV     XADD or XACK, and its words after the key
-- Answers  what the command answers
if ARGV[1] ~= 'XADD' and ARGV[1] ~= 'XACK' then
  return redis.error_reply('ERR write takes XADD and XACK')
end
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
