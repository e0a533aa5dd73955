-- Begins with unique/_seen.lua
-- Keeps messages that are to be published later. Keeping one again, or after it was published, adds nothing.
-- KEYS[1]     {stream}.later: sorted set, messages as netstrings (token, then fields and values), scored by when (ms)
-- KEYS[2]     {stream}.later.done: sorted set, tokens of messages that were published, scored by when (ms)
-- KEYS[3..5]  the event ids that were seen, as _seen.lua says: for tokens that are unique among all event ids
-- ARGV        the window in ms (0: tokens are their message's own), delay (ms), then token and message in turn
-- Answers     how many were added
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = milliseconds(now + ARGV[2])
local added = 0
if window > 0 then
  open_window(now)
  for i = 3, #ARGV, 2 do
    if is_new(ARGV[i]) then added = added + redis.call('ZADD', KEYS[1], at, ARGV[i + 1]) end
  end
  keep_window()
  return added
end
for i = 3, #ARGV, 2 do
  local token, message = ARGV[i], ARGV[i + 1]
  local when = redis.call('ZSCORE', KEYS[2], token)
  if when then
    -- Refused, and written again as it was: the connection that asks may WAIT for what it has written.
    redis.call('ZREM', KEYS[2], token)
    redis.call('ZADD', KEYS[2], when, token)
  else
    when = redis.call('ZSCORE', KEYS[1], message)
    if when then redis.call('ZREM', KEYS[1], message) else added = added + 1 end
    redis.call('ZADD', KEYS[1], when or at, message)
  end
end
return added
