-- Trims a stream to a length, or from an id on, but keeps what a group still needs.
--
-- KEYS[1]  the stream; its oldest entries are deleted
-- ARGV     maximum length (empty: any), smallest id (empty: any)
-- Returns the number of deleted entries; 0 if the stream does not exist.
--
-- A group needs its oldest pending entry and all that follow, and everything after the last one delivered.
-- Ids are compared as strings of digits, because a Lua number cannot hold every sequence number exactly.
local stream, max_len, min_id = KEYS[1], ARGV[1], ARGV[2]

local function before(left, right)
  local lms, lseq = left:match('^(%d+)-(%d+)$')
  local rms, rseq = right:match('^(%d+)-(%d+)$')
  if lms == rms then
    lms, rms = lseq, rseq
  end
  if #lms ~= #rms then
    return #lms < #rms
  end
  return lms < rms
end

local function after(id)
  local ms, seq = id:match('^(%d+)-(%d+)$')
  if #seq > 15 then
    return id -- a Lua number is not exact beyond: keep one entry more
  end
  return string.format('%s-%.0f', ms, tonumber(seq) + 1)
end

local kind = redis.call('TYPE', stream)['ok']
if kind == 'none' then
  return 0
end
local safe = nil -- ids from here on are needed; nil: there is no group
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local group = {}
  for i = 1, #flat, 2 do
    group[flat[i]] = flat[i + 1]
  end
  local needed = after(group['last-delivered-id'])
  if group['pending'] > 0 then
    local oldest = redis.call('XPENDING', stream, group['name'])[2]
    if before(oldest, needed) then
      needed = oldest
    end
  end
  if safe == nil or before(needed, safe) then
    safe = needed
  end
end

local gone = 0
if min_id ~= '' then
  local bound = min_id
  if safe ~= nil and before(safe, bound) then
    bound = safe
  end
  gone = redis.call('XTRIM', stream, 'MINID', '=', bound)
end
if max_len ~= '' then
  local excess = redis.call('XLEN', stream) - tonumber(max_len)
  if excess > 0 and safe == nil then
    gone = gone + redis.call('XTRIM', stream, 'MAXLEN', '=', max_len)
  elseif excess > 0 then
    -- Whole nodes first, which is cheap; LIMIT prevents it from deleting more than the excess.
    local whole = redis.call('XTRIM', stream, 'MINID', '~', safe, 'LIMIT', excess)
    local left = excess - whole
    gone = gone + whole
    if left > 0 then
      local first = redis.call('XRANGE', stream, '-', '(' .. safe, 'COUNT', left + 1)
      local bound = #first > left and first[left + 1][1] or safe
      gone = gone + redis.call('XTRIM', stream, 'MINID', '=', bound)
    end
  end
end
return gone
