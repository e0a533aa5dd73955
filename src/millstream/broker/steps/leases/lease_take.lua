-- Takes the lease of a stream, if its owner record still is what the taker judged it by: of two rivals, one wins.
-- KEYS[1]  owner record beside the data stream: "number member", the member empty after a release
-- ARGV     member, the record as it was seen (empty: there was none), ttl_ms
-- Answers  {1, the new number as text} or {0, the record as it is now}
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
