-- What every form of append_once begins with: is the writer's marker where the writer believes it to be?
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers: hash of partition to 'version rows digest last-id'
-- ARGV     partition, version, position, digest before, digest after, time to live in ms, and what the form adds
-- A digest of '-' is not known, and is not compared.
--
-- Sets `greatest`, the stream's last id, `length`, its entries, `exhausted`, the error where no id comes after that
-- one, and `last`, the id of the writer's last row; `move(count)` sets the marker behind so many more rows;
-- `refused(why)` says no to rows that are there already.
-- `check()` writes nothing and raises nothing. It returns nil where the writer may go on, or why it may not:
--   {'STALE', version}                       a later version of this writer has been here
--   {'ROWS', rows, digest, last-id}          the marker of this version is elsewhere
--   {'DIGEST'}                               the rows before these are others than the stored ones
--   an error                                 a key holds something else
local stream, markers, argv, call = KEYS[1], KEYS[2], ARGV, redis.call
local partition, version, position = argv[1], tonumber(argv[2]), tonumber(argv[3])
local digest_before, digest_after, ttl = argv[4], argv[5], argv[6]

-- What could fail half-way is looked at before the first write: neither a script nor a transaction rolls back.
local kind = call('TYPE', stream)['ok']
local greatest, length, exhausted = '0-0', 0, nil
if kind == 'stream' then
  local facts = call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' then greatest = facts[i + 1] end
    if facts[i] == 'length' then length = facts[i + 1] end
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
    if not known then return redis.error_reply('ERR what lies in the place of a marker of append_once is none') end
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

-- Rows that are there already may not be on the replicas yet, and WAIT may follow. Servers newer than Redis 7.0 wait for
-- no more than what the connection that asks has written: so a refusal writes too.
local function refused(why)
  if why[1] == 'ROWS' then call('PEXPIRE', markers, ttl) end
  return why
end

local function move(count)
  local reached = string.format('%.0f', position + count)
  call('HSET', markers, partition, argv[2] .. ' ' .. reached .. ' ' .. digest_after .. ' ' .. last)
  call('PEXPIRE', markers, ttl)
end

