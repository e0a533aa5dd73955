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
local leave = {}
for i = 9, #ARGV do leave[ARGV[i]] = true end
local some_wait = #redis.call('ZRANGE', due, 0, 0) > 0
local taken, gone = {}, {}

-- Claimed many at a time, as long as they have the same count. What they weigh is known only then: so the first goes
-- alone, and with the others go no more than fit if each is as large as the largest before it.
local together, count, most, largest = {}, 0, 1, 1
local function claim()
  if #together == 0 then return end
  local words = {'XCLAIM', key, group, me, 0, unpack(together)}
  words[#words + 1] = 'RETRYCOUNT'
  words[#words + 1] = math.max(1, count)
  local claimed, at = redis.call(unpack(words)), 1
  for i = 1, #together do
    local entry = claimed[at]
    if entry and entry[1] == together[i] then
      local fields, size = entry[2], 0
      for j = 1, #fields do size = size + #fields[j] end
      bytes, largest, at = bytes - size, math.max(largest, size), at + 1
      taken[#taken + 1] = {entry[1], fields, count}
    else
      gone[#gone + 1] = together[i]
    end
  end
  together, most = {}, math.max(1, math.min(50, math.floor(bytes / largest)))
end

-- Looked at a hundred at a time: where most of a page is taken, the rest of it need not be asked for.
local cursor, looked = ARGV[4], 0
while looked < scan do
  local wanted = math.min(100, scan - looked)
  local page
  if ARGV[8] == '' then
    page = redis.call('XPENDING', key, group, cursor, '+', wanted)
  else
    page = redis.call('XPENDING', key, group, cursor, '+', wanted, ARGV[8])
  end
  for i = 1, #page do
    local id, idle, times = page[i][1], page[i][3], page[i][4]
    if idle >= abandoned and not leave[id] and not (some_wait and redis.call('ZSCORE', due, id)) then
      if times ~= count or #together >= most or #taken + #together >= room then claim() end
      if #taken >= room or bytes <= 0 then return {id, taken, gone} end
      together[#together + 1], count = id, times
    end
  end
  if #page < wanted then
    claim()
    return {'0-0', taken, gone}
  end
  looked, cursor = looked + #page, '(' .. page[#page][1]
end
claim()
return {cursor, taken, gone}
