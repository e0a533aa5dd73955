-- Publishes the messages that are due, oldest first.
-- KEYS[1]  the stream
-- KEYS[2]  {stream}.later: sorted set, messages as netstrings (token, then fields and values), scored by due time (ms)
-- KEYS[3]  {stream}.later.done: sorted set, tokens of published messages, scored by time (ms)
-- ARGV     maximum number of messages, how long (ms) a token is remembered
-- Returns  {ids of the new entries, ms until the next one is due (-1: there is none)}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stamp, ids = string.format('%.0f', now), {}
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', stamp, 'LIMIT', 0, ARGV[1])
for i = 1, #due do
  local message, parts, at = due[i], {}, 1
  while at <= #message do
    local colon = string.find(message, ':', at, true)
    local size = tonumber(string.sub(message, at, colon - 1))
    parts[#parts + 1] = string.sub(message, colon + 1, colon + size)
    at = colon + size + 1
  end
  ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', unpack(parts, 2))
  redis.call('ZREM', KEYS[2], message)
  redis.call('ZADD', KEYS[3], stamp, parts[1])
end
if #due > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now - ARGV[2]))
  redis.call('PEXPIRE', KEYS[3], ARGV[2])
end
local next = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if #next == 0 then return {ids, -1} end
return {ids, math.max(0, tonumber(next[2]) - now)}
