-- Begins with retention/_needs.lua
-- Deletes entries that every group has read and acknowledged, as XDELEX ... ACKED does (Redis 8.2), but none if the
-- stream has no group. Groups that are created later do not see them.
-- KEYS[1]  the stream
-- KEYS[2]  its retention record (keep_declare.lua). Nothing is deleted while a declared group is missing
-- KEYS[3]  and following: {stream}.made:<group> of each group. Nothing is deleted while a group was recreated
-- ARGV[1]  cursor: examine entries after this id; empty: from the first
-- ARGV[2]  step: how many entries one call may examine
-- ARGV[3]  and following: the groups of KEYS[3] and following
-- Returns  {deleted, length, more, cursor}; more: call again with the cursor
local key = KEYS[1]
local step = tonumber(ARGV[2])
local cursor = ARGV[1]
if redis.call('EXISTS', key) == 0 then return {0, 0, 0, ''} end
local groups, safe, any_recreated = read_groups(key, recreated_groups(3, 3))
if #groups == 0 or any_recreated or #missing_groups(KEYS[2], groups, clock_ms()) > 0 then
  return {0, redis.call('XLEN', key), 0, ''}
end
local read = groups[1].last -- every group has read the entries up to this id
for _, group in ipairs(groups) do
  if earlier(group.last, read) then read = group.last end
end

-- Before the first entry that a group needs, all can go. This reads no entry.
local deleted = 0
if cursor == '' then
  local more
  deleted, more = trim(key, 'MINID', safe or following(read), step * 10)
  if more == 1 then return {deleted, redis.call('XLEN', key), 1, ''} end
  if not safe or earlier(read, safe) then return {deleted, redis.call('XLEN', key), 0, ''} end
end

-- After it: a group may hold one entry for long, and others acknowledge those that follow.
local head = {}
if cursor == '' or earlier(cursor, read) then
  head = redis.call('XRANGE', key, cursor == '' and '-' or '(' .. cursor, read, 'COUNT', step)
end
if #head == 0 then return {deleted, redis.call('XLEN', key), 0, ''} end
local first, last = head[1][1], head[#head][1]
local pending = {}
for _, group in ipairs(groups) do
  -- Not in pages: entries that XNACK released (Redis 8.8) are listed first, in any order of ids.
  local items = group.pending > 0 and redis.call('XPENDING', key, group.name, first, last, group.pending) or {}
  for _, item in ipairs(items) do pending[item[1]] = true end
end
local acked = {}
for _, entry in ipairs(head) do
  if not pending[entry[1]] then acked[#acked + 1] = entry[1] end
end
if #acked > 0 then
  -- The server's own command checks once more, in its own tables. It is asked for here because nodes may differ.
  local known = redis.pcall('COMMAND', 'INFO', 'XDELEX')
  local replies = known[1] and redis.pcall('XDELEX', key, 'ACKED', 'IDS', #acked, unpack(acked)) or {err = 'unknown'}
  if replies.err then
    deleted = deleted + redis.call('XDEL', key, unpack(acked))
  else
    for _, reply in ipairs(replies) do
      if reply == 1 then deleted = deleted + 1 end
    end
  end
end
if #head < step then return {deleted, redis.call('XLEN', key), 0, ''} end
return {deleted, redis.call('XLEN', key), 1, last}
