-- Moves a consumer group's position forward, never back; creates the group if it does not exist.
-- KEYS[1]  the stream
-- ARGV     group, id, number of entries up to id (empty: unknown, then the group's lag is unknown too)
-- Returns  1 moved or created, 0 it was there or further, -1 the stream does not exist,
--          -2 the group has consumers or pending entries: moving it would skip entries of its consumers
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
local group, id, entries_read = ARGV[1], ARGV[2], ARGV[3]

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

local verb = 'CREATE'
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = {}
  for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
  if info['name'] == group then
    if info['consumers'] > 0 or info['pending'] > 0 then return -2 end
    local adds_count = info['last-delivered-id'] == id and not info['entries-read'] and entries_read ~= ''
    if not adds_count and not earlier(info['last-delivered-id'], id) then return 0 end
    verb = 'SETID'
  end
end
if entries_read == '' then
  redis.call('XGROUP', verb, KEYS[1], group, id)
else
  redis.call('XGROUP', verb, KEYS[1], group, id, 'ENTRIESREAD', entries_read)
end
return 1
