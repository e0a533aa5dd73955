-- Included by every script of append_once: checks that the writer's marker is at the position that the writer expects.
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers: hash of partition to 'version rows digest last-id'
-- ARGV     partition, version, position, digest before, digest after, time to live in ms, and arguments of the script
-- A digest of '-' is unknown and is not compared.
--
-- Sets `greatest` (the stream's last id), `length` (its number of entries), `exhausted` (the error if no greater id is
-- possible) and `last` (the id of the writer's last row). `move(count)` advances the marker by `count` rows;
-- `refused(why)` must be called for the refusal that is returned.
-- `check()` writes nothing and raises nothing. It returns nil if the writer may append, or why it may not:
--   {'STALE', version}                       a newer version of this writer has written
--   {'ROWS', rows, digest, last-id}          the marker of this version is at another position
--   {'DIGEST'}                               the earlier rows differ from the stored ones
--   an error                                 a key holds another type, or the marker is corrupt
local stream, markers, argv, call = KEYS[1], KEYS[2], ARGV, redis.call
local partition, version, position = argv[1], tonumber(argv[2]), tonumber(argv[3])
local digest_before, digest_after, ttl = argv[4], argv[5], argv[6]

-- Check everything that can fail before the first write: neither a script nor a transaction rolls back.
local kind = call('TYPE', stream)['ok']
local greatest, length, exhausted = '0-0', 0, nil
if kind == 'stream' then
  local info = call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then greatest = info[i + 1] end
    if info[i] == 'length' then length = info[i + 1] end
  end
  if greatest:sub(1, 21) == '18446744073709551615-' then
    exhausted = redis.error_reply('ERR The stream has exhausted the last possible ID, unable to add more items')
  end
end

local last = '0-0'
local function check()
  local marker = redis.pcall('HGET', markers, partition)
  if type(marker) == 'table' then return marker end
  local rows, digest = 0, '-'
  if marker then
    local known, r, d, l = marker:match('^(%d+) (%d+) (%S+) (%S+)$')
    if not known then return redis.error_reply('ERR append_once marker is corrupt') end
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
  if kind ~= 'none' and kind ~= 'stream' then
    return redis.error_reply('WRONGTYPE Operation against a key holding the wrong kind of value')
  end
end

-- Rows that are stored already may not have reached the replicas, and WAIT may follow. Servers newer than Redis 7.0
-- wait only for writes of the same connection. So a refusal writes too.
local function refused(why)
  if why[1] == 'ROWS' then call('PEXPIRE', markers, ttl) end
  return why
end

local function move(count)
  local reached = string.format('%.0f', position + count)
  call('HSET', markers, partition, argv[2] .. ' ' .. reached .. ' ' .. digest_after .. ' ' .. last)
  call('PEXPIRE', markers, ttl)
end

