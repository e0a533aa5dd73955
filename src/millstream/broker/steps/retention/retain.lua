-- Applies a retention policy to a stream: never what a group still needs, except for the hard cap, which is counted.
-- KEYS[1]  the stream
-- KEYS[2]  marks beside it: text "ms id;ms id;...", oldest first; at that time every group was done with all before id
-- KEYS[3]  hash beside it: group to the number of entries that the hard cap has ever taken from it before it was done
-- ARGV[1]  now_ms, empty for the server's own clock
-- ARGV[2]  max_age_ms      drop what is older                               } each may be empty: no such limit
-- ARGV[3]  max_len         keep at most so many                             }
-- ARGV[4]  keep_acked_ms   drop what every group was done with so long ago  }
-- ARGV[5]  hard_max_len    keep at most so many, needed or not              }
-- ARGV[6]  step            how many entries one call may look at
-- ARGV[7]  hard_max_age_ms drop what is older, needed or not; may be empty
-- Answers  {dropped, length, more, taken, {{group, oldest needed id or empty, holds back, undelivered, unacked}, ...}}
--          more: call again, there is more to drop; taken: dropped by the hard cap; holds back: counted up to step
local key = KEYS[1]
local step = tonumber(ARGV[6])

-- Ids are compared as texts of digits: a sequence number may be greater than what a Lua number holds exactly.
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

-- The id after this one; the same one where it cannot be told exactly, which keeps an entry too many.
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

if redis.call('EXISTS', key) == 0 then return {0, 0, 0, 0, {}} end

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The safe point: the oldest entry that any group still needs. None: every group is done with everything.
local groups = {}
local safe = nil
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local info = as_map(flat)
  local group = {name = info['name'], last = info['last-delivered-id'], holds = 0, undelivered = 0, unacked = 0}
  -- After the greatest id of all there is no other, and to ask for it is an error.
  local at_end = group.last == '18446744073709551615-18446744073709551615'
  local unread = at_end and {} or redis.call('XRANGE', key, '(' .. group.last, '+', 'COUNT', 1)
  if #unread > 0 then group.needs = unread[1][1] end
  if info['pending'] > 0 then
    local smallest = redis.call('XPENDING', key, group.name)[2]
    local entry = redis.call('XRANGE', key, smallest, '+', 'COUNT', 1)
    if #entry > 0 and (not group.needs or earlier(entry[1][1], group.needs)) then group.needs = entry[1][1] end
  end
  if group.needs and (not safe or earlier(group.needs, safe)) then safe = group.needs end
  groups[#groups + 1] = group
end

-- How far the policy wants to cut: everything before this id.
local cut = nil
if ARGV[2] ~= '' and now > tonumber(ARGV[2]) then
  cut = string.format('%.0f', now - tonumber(ARGV[2])) .. '-0'
end
if ARGV[4] ~= '' and #groups > 0 then
  local keep = tonumber(ARGV[4])
  local done = safe or following(as_map(redis.call('XINFO', 'STREAM', key))['last-generated-id'])
  local bound = nil
  if keep == 0 then
    bound = done
  else
    local marks = {}
    for at, id in string.gmatch(redis.call('GET', KEYS[2]) or '', '(%d+) (%d+%-%d+);') do
      marks[#marks + 1] = {tonumber(at), id}
    end
    -- Sixteen marks span the time to keep: an entry stays up to a sixteenth longer, and the key stays small.
    if #marks == 0 or now - marks[#marks][1] >= math.max(1, math.floor(keep / 16)) then
      marks[#marks + 1] = {now, done}
    end
    local first = 1
    for i, mark in ipairs(marks) do
      if mark[1] <= now - keep then
        bound = mark[2]
        first = i
      end
    end
    local texts = {}
    for i = first, #marks do texts[#texts + 1] = string.format('%.0f', marks[i][1]) .. ' ' .. marks[i][2] .. ';' end
    redis.call('SET', KEYS[2], table.concat(texts), 'PX', string.format('%.0f', keep * 2 + 86400000))
  end
  if bound and (not cut or earlier(cut, bound)) then cut = bound end
end

local dropped = 0
local more = 0
if cut then
  local upto = cut
  if safe and earlier(safe, cut) then upto = safe end
  dropped = redis.call('XTRIM', key, 'MINID', '=', upto)
end

local max_len = tonumber(ARGV[3])
local excess = max_len and redis.call('XLEN', key) - max_len or 0
if excess > 0 then
  if not safe then
    dropped = dropped + redis.call('XTRIM', key, 'MAXLEN', '=', max_len)
  else
    -- Whole nodes first, which costs little; LIMIT keeps it from taking more than the excess. The rest is looked at,
    -- because Redis has no rank: a bounded number of the oldest entries, to find where the excess ends.
    local whole = redis.call('XTRIM', key, 'MINID', '~', safe, 'LIMIT', excess)
    dropped = dropped + whole
    excess = excess - whole
    if excess > 0 then
      local upto = safe
      local at_most = math.min(excess, step)
      local head = redis.call('XRANGE', key, '-', '(' .. safe, 'COUNT', at_most + 1)
      if #head > at_most then
        upto = head[#head][1]
        if excess > step then more = 1 end
      end
      dropped = dropped + redis.call('XTRIM', key, 'MINID', '=', upto)
    end
  end
end

local taken = 0
local hard = tonumber(ARGV[5])
-- Not before the rest is done: what nobody needs goes first.
excess = hard and more == 0 and redis.call('XLEN', key) - hard or 0
local hard_age = tonumber(ARGV[7])
if hard_age and more == 0 and now > hard_age then
  local old = redis.call('XRANGE', key, '-', '(' .. string.format('%.0f', now - hard_age) .. '-0', 'COUNT', step + 1)
  excess = math.max(excess, #old)
end
if excess > 0 then
  local head = redis.call('XRANGE', key, '-', '+', 'COUNT', math.min(excess, step))
  local inside = {}
  for _, entry in ipairs(head) do inside[entry[1]] = true end
  for _, group in ipairs(groups) do
    for _, entry in ipairs(head) do
      if earlier(group.last, entry[1]) then group.undelivered = group.undelivered + 1 end
    end
    local pending = redis.call('XPENDING', key, group.name, head[1][1], head[#head][1], #head)
    while #pending > 0 do
      for _, item in ipairs(pending) do
        -- Pending beyond the group's position (after XGROUP SETID) is counted once, as undelivered.
        if inside[item[1]] and not earlier(group.last, item[1]) then group.unacked = group.unacked + 1 end
      end
      if #pending < #head then break end
      pending = redis.call('XPENDING', key, group.name, '(' .. pending[#pending][1], head[#head][1], #head)
    end
    if group.undelivered + group.unacked > 0 then
      redis.call('HINCRBY', KEYS[3], group.name, group.undelivered + group.unacked)
    end
  end
  taken = redis.call('XTRIM', key, 'MINID', '=', following(head[#head][1]))
  dropped = dropped + taken
  if excess > step and taken > 0 then more = 1 end
end

-- Who holds back what: entries that the policy wants gone and that are still there, for each group that needs them.
local length = redis.call('XLEN', key)
if safe and more == 0 and (cut or max_len) then
  excess = max_len and length - max_len or 0
  for i, entry in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', step)) do
    if not (i <= excess or (cut and earlier(entry[1], cut))) then break end
    for _, group in ipairs(groups) do
      if group.needs and not earlier(entry[1], group.needs) then group.holds = group.holds + 1 end
    end
  end
end

local told = {}
for i, group in ipairs(groups) do
  told[i] = {group.name, group.needs or '', group.holds, group.undelivered, group.unacked}
end
return {dropped, length, more, taken, told}
