-- Keeps messages that are to be published later. Keeping one again, or after it was published, adds nothing.
-- KEYS[1]  {stream}.later: sorted set, messages as netstrings (token, then fields and values), scored by when (ms)
-- KEYS[2]  {stream}.later.done: sorted set, tokens of messages that were published, scored by when (ms)
-- ARGV     delay (ms), then token and message in turn
-- Answers  how many were added
local time = redis.call('TIME')
local at = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1])
local added = 0
for i = 2, #ARGV, 2 do
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then
    added = added + redis.call('ZADD', KEYS[1], 'NX', at, ARGV[i + 1])
  end
end
return added
