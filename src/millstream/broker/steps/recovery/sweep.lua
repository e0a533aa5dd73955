-- Looks at one page of a group's pending list and takes over what was abandoned. The cursor always comes round.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for another delivery; they are left alone
-- ARGV     group, consumer, idle time (ms) that means abandoned, cursor, entries to look at, entries to take, bytes,
--          whose entries (empty: everybody's), ids to leave alone...
-- Answers  {next cursor (0-0: come round), {id, fields, times delivered} each, ids that are pending but deleted}
-- Taking over is no delivery: the count stays, and is answered as it was. Only an entry that was handed back in good
-- order (answered as 0) counts as delivered once from now on.
local key, due, group, me = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local abandoned, scan, room, bytes = tonumber(ARGV[3]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local page
if ARGV[8] == '' then
  page = redis.call('XPENDING', key, group, ARGV[4], '+', scan)
else
  page = redis.call('XPENDING', key, group, ARGV[4], '+', scan, ARGV[8])
end
local leave = {}
for i = 9, #ARGV do leave[ARGV[i]] = true end
local taken, gone = {}, {}
for i = 1, #page do
  local id, idle, times = page[i][1], page[i][3], page[i][4]
  if idle >= abandoned and not leave[id] and not redis.call('ZSCORE', due, id) then
    if #taken >= room or bytes <= 0 then return {id, taken, gone} end
    local entry = redis.call('XCLAIM', key, group, me, 0, id, 'RETRYCOUNT', math.max(1, times))[1]
    if entry then
      taken[#taken + 1] = {id, entry[2], times}
      for j = 1, #entry[2] do bytes = bytes - #entry[2][j] end
    else
      gone[#gone + 1] = id
    end
  end
end
if #page < scan then return {'0-0', taken, gone} end
return {'(' .. page[#page][1], taken, gone}
