-- Begins with append_unique/_seen.lua
-- Stores messages that are published later. A message that is stored already or was published adds nothing.
-- KEYS[1]     {stream}.later: sorted set, messages as netstrings (token, then fields and values), scored by due time (ms)
-- KEYS[2]     {stream}.later.done: sorted set, tokens of published messages, scored by time (ms)
-- KEYS[3..5]  the event ids, see _seen.lua: used if tokens are event ids
-- ARGV        the window in ms (0: a token identifies only its own message), delay (ms), then token and message in turn
-- Returns     how many were added
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
    -- Skipped, but written again unchanged: WAIT may follow on this connection, and covers only its own writes.
    redis.call('ZREM', KEYS[2], token)
    redis.call('ZADD', KEYS[2], when, token)
  else
    when = redis.call('ZSCORE', KEYS[1], message)
    if when then redis.call('ZREM', KEYS[1], message) else added = added + 1 end
    redis.call('ZADD', KEYS[1], when or at, message)
  end
end
return added
