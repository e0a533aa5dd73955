-- Begins with append_once/_marker.lua
-- append_once for rows with given ids: appends them and moves the writer's marker atomically.
--
-- KEYS[1]  the stream; the given ids must be greater than its last id
-- KEYS[2]  the writer's markers
-- ARGV     see _marker.lua; then for each row: its number of arguments (without the id), its id, its arguments
--
-- Returns {'OK', id...}, or a refusal of _marker.lua, or, with nothing written,
--   {'ID', id, the id that it must be greater than}

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
local reply = { 'OK' }
while at <= #argv do
  local count = tonumber(argv[at])
  last = call('XADD', stream, unpack(argv, at + 1, at + 1 + count))
  reply[#reply + 1] = last
  at = at + count + 2
end
move(#reply - 1)
return reply
