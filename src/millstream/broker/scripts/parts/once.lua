-- What every form of append_once begins with: is the writer's marker where the writer believes it to be?
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers: hash of partition to 'version rows digest last-id'
-- ARGV     partition, version, position, digest before, digest after, time to live in ms, and what the form adds
-- A digest of '-' is not known, and is not compared.
--
-- Returns, having written nothing,
--   {'STALE', version}                       a later version of this writer has been here
--   {'ROWS', rows, digest, last-id}          the marker of this version is elsewhere
--   {'DIGEST'}                               the rows before these are others than the stored ones
-- or goes on, with `greatest`, the stream's last id, `exhausted`, the error where no id comes after it, `last`, the id
-- of the last row, and `move(count)`, which sets the marker behind so many more rows.
local stream, markers, argv, call = KEYS[1], KEYS[2], ARGV, redis.call
local partition, version, position = argv[1], tonumber(argv[2]), tonumber(argv[3])
local digest_before, digest_after, ttl = argv[4], argv[5], argv[6]

local rows, digest, last = 0, '-', '0-0'
local marker = call('HGET', markers, partition)
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
local kind = call('TYPE', stream)['ok']
if kind ~= 'none' and kind ~= 'stream' then
  return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
end
local greatest, exhausted = '0-0', nil
if kind == 'stream' then
  local facts = call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' then greatest = facts[i + 1] end
  end
  if greatest:sub(1, 21) == '18446744073709551615-' then
    exhausted = redis.error_reply('ERR The stream has exhausted the last possible ID, unable to add more items')
  end
end

local function move(count)
  local reached = string.format('%.0f', rows + count)
  call('HSET', markers, partition, argv[2] .. ' ' .. reached .. ' ' .. digest_after .. ' ' .. last)
  call('PEXPIRE', markers, ttl)
end

