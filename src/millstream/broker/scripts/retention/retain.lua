-- Begins with retention/_needs.lua
-- Applies a retention policy to a stream: keeps what a group still needs, except for the hard limits, which count losses.
-- KEYS[1]  the stream
-- KEYS[2]  its marks: text "ms id;ms id;...", oldest first; at that time every group was done with all entries before id
-- KEYS[3]  its losses: hash of group to the number of entries that a hard limit deleted before the group was done
-- KEYS[4]  its retention record (keep_declare.lua)
-- KEYS[5]  and following: {stream}.made:<group> of each group. A group that was recreated may need every entry
-- ARGV[1]  now_ms, empty for the server's clock
-- ARGV[2]  max_age_ms      delete older entries                            } each may be empty: no such limit
-- ARGV[3]  max_len         keep at most so many                            }
-- ARGV[4]  keep_acked_ms   delete what every group was done with so long   }
-- ARGV[5]  hard_max_len    keep at most so many, needed or not             }
-- ARGV[6]  step            how many entries one call may examine
-- ARGV[7]  hard_max_age_ms delete older entries, needed or not; may be empty
-- ARGV[8]  while a declared group is missing: 1: nothing is deleted; 0: only the hard limits delete
-- ARGV[9]  and following: the groups of KEYS[5] and following
-- Returns  {dropped, length, more, taken, {{group, oldest needed id or empty, holds back, undelivered, unacked}, ...}}
--          more: call again, there is more to delete; taken: deleted by a hard limit; holds back: counted up to step
local key = KEYS[1]
local step = tonumber(ARGV[6])

if redis.call('EXISTS', key) == 0 then return {0, 0, 0, 0, {}} end

local now = tonumber(ARGV[1]) or clock_ms()

-- The safe point: the oldest entry that any group still needs. nil: every group is done with all entries.
local groups, safe = read_groups(key, recreated_groups(5, 9))
if #missing_groups(KEYS[4], groups, clock_ms()) > 0 then
  if ARGV[8] == '1' then return {0, redis.call('XLEN', key), 0, 0, {}} end
  safe = first_id(key)
end
for _, group in ipairs(groups) do
  group.holds, group.undelivered, group.unacked = 0, 0, 0
end

-- The policy deletes everything before this id.
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
    -- Sixteen marks cover the time to keep: an entry stays up to a sixteenth longer, and the key stays small.
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
  dropped, more = trim(key, 'MINID', upto, step * 10)
end

local max_len = tonumber(ARGV[3])
local excess = max_len and more == 0 and redis.call('XLEN', key) - max_len or 0
if excess > 0 then
  if not safe then
    local gone
    gone, more = trim(key, 'MAXLEN', max_len, step * 10)
    dropped = dropped + gone
  else
    -- Whole nodes first, which is cheap; LIMIT prevents it from deleting more than the excess. Redis has no rank, so
    -- the remaining excess is found by reading a limited number of the oldest entries.
    local limit = math.min(excess, step * 10)
    local whole = redis.call('XTRIM', key, 'MINID', '~', safe, 'LIMIT', limit)
    dropped = dropped + whole
    excess = excess - whole
    if limit < excess and whole * 2 > limit then
      more = 1
    elseif excess > 0 then
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
-- Only after the soft limits are met: entries that no group needs are deleted first.
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

-- For each group: entries that the policy would delete and that this group still needs.
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

local reports = {}
for i, group in ipairs(groups) do
  reports[i] = {group.name, group.needs or '', group.holds, group.undelivered, group.unacked}
end
return {dropped, length, more, taken, reports}
