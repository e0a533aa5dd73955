-- append_once for rows that bring their ids: appends them and moves the writer's marker, in one step.
--
-- KEYS[1]  the stream; entries are added with the given ids, which must be greater than its last one
-- KEYS[2]  the writer's markers: hash of partition to 'version rows digest last-id'
-- ARGV     partition, version, position, digest before, digest after, time to live in ms,
--          and for each row: its number of words (the id not counted), its id, its words
-- A digest of '-' is not known, and is not compared.
--
-- Returns {'OK', id...}, or, having written nothing,
--   {'STALE', version}, {'ROWS', rows, digest, last-id}, {'DIGEST'}      as append_once does
--   {'ID', id, the id that it must be greater than}
local stream, markers = KEYS[1], KEYS[2]
local partition, version, position = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local digest_before, digest_after, ttl = ARGV[4], ARGV[5], ARGV[6]

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

local rows, digest, last = 0, '-', '0-0'
local marker = redis.call('HGET', markers, partition)
if marker then
  local known, r, d, l = marker:match('^(%d+) (%d+) (%S+) (%S+)$')
  if tonumber(known) > version then
    return { 'STALE', known }
  end
  if tonumber(known) == version then
    rows, digest, last = tonumber(r), d, l
  end
end
if position ~= rows then
  return { 'ROWS', string.format('%.0f', rows), digest, last }
end
if digest ~= '-' and digest_before ~= '-' and digest ~= digest_before then
  return { 'DIGEST' }
end

-- What could fail half-way is looked at before the first write: a script does not roll back.
local kind = redis.call('TYPE', stream)['ok']
if kind ~= 'none' and kind ~= 'stream' then
  return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
end
local greatest = '0-0'
if kind == 'stream' then
  local facts = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' then greatest = facts[i + 1] end
  end
end
local at = 7
while at <= #ARGV do
  if not earlier(greatest, ARGV[at + 1]) then
    return { 'ID', ARGV[at + 1], greatest }
  end
  greatest = ARGV[at + 1]
  at = at + tonumber(ARGV[at]) + 2
end

at = 7
local answer = { 'OK' }
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  last = redis.call('XADD', stream, unpack(ARGV, at + 1, at + 1 + count))
  answer[#answer + 1] = last
  at = at + count + 2
end
rows = string.format('%.0f', rows + #answer - 1)
redis.call('HSET', markers, partition, ARGV[2] .. ' ' .. rows .. ' ' .. digest_after .. ' ' .. last)
redis.call('PEXPIRE', markers, ttl)
return answer
