-- Takes the lease of a stream if its owner record is unchanged since the caller read it: of two competing members one
-- succeeds.
-- KEYS[1]  owner record of the data stream: "number member", the member empty after a release
-- ARGV     member, the record that the caller read (empty: there was none), ttl_ms
-- Returns  {1, the new number as text} or {0, the current record}
local current = redis.call('GET', KEYS[1]) or ''
if current ~= ARGV[2] then
  return {0, current}
end
local time = redis.call('TIME')
local number = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local last = tonumber(string.match(current, '^%d+') or '0')
if last >= number then
  number = last + 1
end
local text = string.format('%.0f', number)
redis.call('SET', KEYS[1], text .. ' ' .. ARGV[1], 'PX', ARGV[3])
return {1, text}
