-- Begins with retention/_needs.lua
-- Trims a stream to a length, or from an id on, but keeps what a group still needs.
-- KEYS[1]  the stream; its oldest entries are deleted
-- KEYS[2]  its retention record (keep_declare.lua). Nothing is deleted while a declared group is missing
-- KEYS[3]  and following: {stream}.made:<group> of each group. Nothing is deleted while a group was recreated
--          KEYS has only the stream if its name cannot have companion keys: then consumers do not use it
-- ARGV[1]  maximum length (empty: any)
-- ARGV[2]  smallest id (empty: any)
-- ARGV[3]  and following: the groups of KEYS[3] and following
-- Returns  the number of deleted entries; 0 if the stream does not exist
local key, max_len, min_id = KEYS[1], ARGV[1], ARGV[2]
if redis.call('EXISTS', key) == 0 then return 0 end
local has_companions = #KEYS > 1
local groups, safe, any_recreated = read_groups(key, has_companions and recreated_groups(3, 3) or {})
if any_recreated or (has_companions and #missing_groups(KEYS[2], groups, clock_ms()) > 0) then return 0 end

local gone = 0
if min_id ~= '' then
  local bound = min_id
  if safe and earlier(safe, bound) then bound = safe end
  gone = redis.call('XTRIM', key, 'MINID', '=', bound)
end
if max_len ~= '' then
  local excess = redis.call('XLEN', key) - tonumber(max_len)
  if excess > 0 and not safe then
    gone = gone + redis.call('XTRIM', key, 'MAXLEN', '=', max_len)
  elseif excess > 0 then
    -- Whole nodes first, which is cheap; LIMIT prevents it from deleting more than the excess.
    local whole = redis.call('XTRIM', key, 'MINID', '~', safe, 'LIMIT', excess)
    local remaining = excess - whole
    gone = gone + whole
    if remaining > 0 then
      local first = redis.call('XRANGE', key, '-', '(' .. safe, 'COUNT', remaining + 1)
      local bound = #first > remaining and first[remaining + 1][1] or safe
      gone = gone + redis.call('XTRIM', key, 'MINID', '=', bound)
    end
  end
end
return gone
