-- Examines one page of a group's pending list and claims abandoned entries. The cursor always reaches the end.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for redelivery; they are skipped
-- ARGV     group, consumer, idle time (ms) from which on an entry is abandoned, cursor, maximum number of entries to
--          examine, to claim, maximum number of bytes, owner of the entries (empty: any), ids to skip...
-- Returns  {next cursor (0-0: the scan is complete), {id, fields, times delivered} each, ids that are pending but deleted}
-- A claim is no delivery: the count does not change and is returned. Only an entry that was returned unstarted (its count
-- is 0) counts as delivered once from now on.
-- Entries that XNACK released (Redis 8.8) have no owner and the idle time -1; XPENDING lists them first, in any order of
-- ids. They are claimed at once, and the cursor does not depend on their ids.
local key, due, group, me = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local min_idle, scan, room, bytes = tonumber(ARGV[3]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local skip = {}
for i = 9, #ARGV do skip[ARGV[i]] = true end
local has_delayed = #redis.call('ZRANGE', due, 0, 0) > 0
local taken, gone = {}, {}

-- Entries with the same delivery count are claimed in batches. Their size is known only after the claim: so the first
-- is claimed alone, and later batches have as many as fit if each is as large as the largest before.
local batch, count, max_batch, largest = {}, 0, 1, 1
local function claim()
  if #batch == 0 then return end
  local args = {'XCLAIM', key, group, me, 0, unpack(batch)}
  args[#args + 1] = 'RETRYCOUNT'
  args[#args + 1] = string.format('%.0f', math.max(1, count))
  local claimed, at = redis.call(unpack(args)), 1
  for i = 1, #batch do
    local entry = claimed[at]
    if entry and entry[1] == batch[i] then
      local fields, size = entry[2], 0
      for j = 1, #fields do size = size + #fields[j] end
      bytes, largest, at = bytes - size, math.max(largest, size), at + 1
      taken[#taken + 1] = {entry[1], fields, count}
    else
      gone[#gone + 1] = batch[i]
    end
  end
  batch, max_batch = {}, math.max(1, math.min(50, math.floor(bytes / largest)))
end

-- Examine a hundred at a time: if most of a page is claimed, the remainder need not be read.
local cursor, examined = ARGV[4], 0
while examined < scan do
  local page_size = math.min(100, scan - examined)
  local page
  if ARGV[8] == '' then
    page = redis.call('XPENDING', key, group, cursor, '+', page_size)
  else
    page = redis.call('XPENDING', key, group, cursor, '+', page_size, ARGV[8])
  end
  local last, done = nil, #taken + #gone
  for i = 1, #page do
    local id, idle = page[i][1], page[i][3]
    local times = math.min(page[i][4], 9007199254740991) -- XNACK FATAL sets more than a Lua number holds exactly
    local released = idle < 0
    if not released then last = id end
    if (released or idle >= min_idle) and not skip[id] and not (has_delayed and redis.call('ZSCORE', due, id)) then
      if times ~= count or #batch >= max_batch or #taken + #batch >= room then claim() end
      if #taken >= room or bytes <= 0 then return {released and cursor or id, taken, gone} end
      batch[#batch + 1], count = id, times
    end
  end
  if #page < page_size then
    claim()
    return {'0-0', taken, gone}
  end
  examined = examined + #page
  if not last then claim() end
  if last or #taken + #gone == done then cursor = '(' .. (last or page[#page][1]) end
end
claim()
return {cursor, taken, gone}
