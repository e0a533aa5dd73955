-- Which of several streams have work: abandoned entries, entries due for redelivery, delayed messages. Reads only.
-- KEYS[1]  the stream
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for redelivery, scored by due time (ms)
-- KEYS[3]  {stream}.later: sorted set, delayed messages, scored by due time (ms); then the next stream's three, and so on
-- ARGV     group, idle time (ms) from which on an entry is abandoned, maximum length of a pending list to examine
-- Returns  for each stream with work: {its index from 0, 1 if a sweep may claim entries,
--          ms until the next redelivery is due (-1: there is none), the same for delayed messages}
-- A stream that cannot be examined (no group, another type) is left out: reading it reports the error.
local group, min_idle, scan = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now
local function wait_for(key)
  local first = redis.pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first.err or #first == 0 then return -1 end
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return math.max(0, tonumber(first[2]) - now)
end
local visits = {}
for i = 1, #KEYS, 3 do
  local pending, sweep = redis.pcall('XPENDING', KEYS[i], group), 0
  if not pending.err and pending[1] > 0 then
    -- A long pending list is swept page by page instead: XPENDING with IDLE would scan all of it in one call.
    if pending[1] > scan or #redis.call('XPENDING', KEYS[i], group, 'IDLE', min_idle, '-', '+', 1) > 0 then
      sweep = 1
    else
      local first = redis.call('XPENDING', KEYS[i], group, '-', '+', 1)[1]
      if first and first[3] < 0 then sweep = 1 end -- released by XNACK: first in the list
    end
  end
  local due, later = -1, -1
  if redis.call('EXISTS', KEYS[i + 1], KEYS[i + 2]) > 0 then -- mostly neither exists
    due, later = wait_for(KEYS[i + 1]), wait_for(KEYS[i + 2])
  end
  if sweep == 1 or due >= 0 or later >= 0 then visits[#visits + 1] = {(i - 1) / 3, sweep, due, later} end
end
return visits
