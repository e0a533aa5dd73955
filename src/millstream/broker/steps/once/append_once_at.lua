-- Begins with once/_marker.lua
-- append_once for rows that bring their ids: appends them and moves the writer's marker, in one step.
--
-- KEYS[1]  the stream; entries are added with the given ids, which must be greater than its last one
-- KEYS[2]  the writer's markers
-- ARGV     as _marker.lua says; then for each row: its number of words (the id not counted), its id, its words
--
-- Returns {'OK', id...}, or a refusal of _marker.lua, or, having written nothing,
--   {'ID', id, the id that it must be greater than}

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

local refusal = check()
if refusal then return refused(refusal) end

local at = 7
while at <= #argv do
  if not earlier(greatest, argv[at + 1]) then
    return { 'ID', argv[at + 1], greatest }
  end
  greatest = argv[at + 1]
  at = at + tonumber(argv[at]) + 2
end

at = 7
local answer = { 'OK' }
while at <= #argv do
  local count = tonumber(argv[at])
  last = call('XADD', stream, unpack(argv, at + 1, at + 1 + count))
  answer[#answer + 1] = last
  at = at + count + 2
end
move(#answer - 1)
return answer
