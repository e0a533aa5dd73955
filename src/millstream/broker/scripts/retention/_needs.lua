-- What groups need of a stream, for the scripts that delete entries.
-- Ids are compared as strings of digits, because a Lua number cannot hold every sequence number exactly.
local function earlier(a, b)
  local ams, aseq = string.match(a, '^(%d+)-(%d+)$')
  local bms, bseq = string.match(b, '^(%d+)-(%d+)$')
  if ams ~= bms then
    if #ams ~= #bms then return #ams < #bms end
    return ams < bms
  end
  if #aseq ~= #bseq then return #aseq < #bseq end
  return aseq < bseq
end

-- The next id; the same id if a Lua number cannot hold it exactly, which keeps one entry more.
local function following(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  local number = tonumber(seq)
  if number >= 9007199254740991 then return id end
  return ms .. '-' .. string.format('%.0f', number + 1)
end

local function as_map(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local function clock_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Which groups are not known to be complete. A group that was recreated does not list what consumers of the deleted one
-- still have in flight: until they have moved it back, it may need every entry. So may a group that the caller did not
-- know, because it was created after the caller read their names.
-- Takes the index of the first {stream}.made:<group> in KEYS, and of the first name of a group in ARGV.
local function recreated_groups(first_key, first_name)
  local incomplete = setmetatable({}, {__index = function() return true end})
  for i = 0, #ARGV - first_name do
    incomplete[ARGV[first_name + i]] = redis.call('EXISTS', KEYS[first_key + i]) == 1
  end
  return incomplete
end

-- The id of the stream's first entry; nil if it has none.
local function first_id(key)
  local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  return first and first[1]
end

-- The groups, each with the oldest entry that it needs (nil: none), the oldest entry that any group needs, and whether
-- a group was recreated.
local function read_groups(key, recreated)
  local groups = {}
  local any_recreated = false
  local safe = nil
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local info = as_map(flat)
    local group = {name = info['name'], last = info['last-delivered-id'], pending = info['pending']}
    -- A range after the greatest possible id is an error.
    local at_end = group.last == '18446744073709551615-18446744073709551615'
    local unread = at_end and {} or redis.call('XRANGE', key, '(' .. group.last, '+', 'COUNT', 1)
    if #unread > 0 then group.needs = unread[1][1] end
    if group.pending > 0 then
      local smallest = redis.call('XPENDING', key, group.name)[2]
      local entry = redis.call('XRANGE', key, smallest, '+', 'COUNT', 1)
      if #entry > 0 and (not group.needs or earlier(entry[1][1], group.needs)) then group.needs = entry[1][1] end
    end
    if recreated[group.name] then
      any_recreated = true
      group.needs = first_id(key)
    end
    if group.needs and (not safe or earlier(group.needs, safe)) then safe = group.needs end
    groups[#groups + 1] = group
  end
  return groups, safe, any_recreated
end

-- The groups that live workers declare in the retention record and that the stream does not have: they were not created
-- yet, or were lost in a failover, and may need every entry.
local function missing_groups(record, groups, now)
  local known = {}
  for _, group in ipairs(groups) do known[group.name] = true end
  local missing = {}
  local fields = redis.call('HGETALL', record)
  for i = 1, #fields, 2 do
    local name = string.match(fields[i], '^group (.*)$')
    if name and not known[name] and (tonumber(fields[i + 1]) or now) > now then missing[#missing + 1] = name end
  end
  return missing
end

-- Trims by MINID or MAXLEN, in one call about as many entries as the limit: whole nodes first, then the rest.
-- Returns how many, and 1 if there may be more of them.
local function trim(key, strategy, threshold, limit)
  local gone = redis.call('XTRIM', key, strategy, '~', threshold, 'LIMIT', limit)
  -- It stops before the node with which it would exceed the limit. A node has far fewer entries than half of it.
  if gone * 2 > limit then return gone, 1 end
  return gone + redis.call('XTRIM', key, strategy, '=', threshold), 0
end

