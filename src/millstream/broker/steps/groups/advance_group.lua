-- Moves a consumer group's position forward, never back; makes the group where it is missing.
-- KEYS[1]  the stream
-- ARGV     group, id, entries read up to id (empty: not known, and the group's lag will not be known either)
-- Answers  1 moved or made, 0 it was there or beyond, -1 there is no such stream
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
local group, id, entries_read = ARGV[1], ARGV[2], ARGV[3]

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

local verb = 'CREATE'
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local info = {}
  for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
  if info['name'] == group then
    local told = info['entries-read']
    local teaches = info['last-delivered-id'] == id and not told and entries_read ~= ''
    if not teaches and not earlier(info['last-delivered-id'], id) then return 0 end
    verb = 'SETID'
  end
end
if entries_read == '' then
  redis.call('XGROUP', verb, KEYS[1], group, id)
else
  redis.call('XGROUP', verb, KEYS[1], group, id, 'ENTRIESREAD', entries_read)
end
return 1
