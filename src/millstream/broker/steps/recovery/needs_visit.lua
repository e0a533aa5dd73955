-- Which of many streams have work that nobody is at: abandoned entries, put-off ones, delayed messages. Reads only.
-- KEYS[1]  the stream
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for another delivery, scored by when (ms)
-- KEYS[3]  {stream}.later: sorted set, delayed messages, scored by when (ms); then the next stream's three, and so on
-- ARGV     group, idle time (ms) that means abandoned, pending entries that are looked at one by one, at most
-- Answers  for each stream that has any: {its number from 0, 1 if a sweep may find something,
--          ms until the next put-off entry is due (-1: there is none), the same for delayed messages}
-- A stream that cannot be looked at (no group, another type) is left out: whoever reads it meets that.
local group, abandoned, scan = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function wait_for(key)
  local first = redis.pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first.err or #first == 0 then return -1 end
  return math.max(0, tonumber(first[2]) - now)
end
local found = {}
for i = 1, #KEYS, 3 do
  local pending, sweep = redis.pcall('XPENDING', KEYS[i], group), 0
  if not pending.err and pending[1] > 0 then
    -- A long list is looked at page by page: XPENDING with IDLE would go through all of it in one go.
    if pending[1] > scan or #redis.call('XPENDING', KEYS[i], group, 'IDLE', abandoned, '-', '+', 1) > 0 then
      sweep = 1
    end
  end
  local due, later = wait_for(KEYS[i + 1]), wait_for(KEYS[i + 2])
  if sweep == 1 or due >= 0 or later >= 0 then found[#found + 1] = {(i - 1) / 3, sweep, due, later} end
end
return found
