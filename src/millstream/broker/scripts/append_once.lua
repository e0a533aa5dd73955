-- Appends a writer's rows and moves its marker, in one step, if the marker is where the writer believes it to be.
--
-- KEYS[1]  the stream; entries are added at its end
-- KEYS[2]  the writer's markers: hash of partition to 'version rows digest last-id'
-- ARGV     partition, version, position, digest before, digest after, time to live in ms,
--          number of words of a trim policy, those words,
--          and for each row: its number of words, those words
-- A digest of '-' is not known, and is not compared.
--
-- Returns {'OK', id...}, or, having written nothing,
--   {'STALE', version}                       a later version of this writer has been here
--   {'ROWS', rows, digest, last-id}          the marker of this version is elsewhere
--   {'DIGEST'}                               the rows before these are others than the stored ones
local stream, markers = KEYS[1], KEYS[2]
local partition, version, position = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local digest_before, digest_after, ttl = ARGV[4], ARGV[5], ARGV[6]

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
if kind == 'stream' then
  local facts = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' and facts[i + 1]:sub(1, 21) == '18446744073709551615-' then
      return redis.error_reply('ERR The stream has exhausted the last possible ID, unable to add more items')
    end
  end
end

local words = tonumber(ARGV[7])
local at = 8 + words
local answer = { 'OK' }
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  last = redis.call('XADD', stream, '*', unpack(ARGV, at + 1, at + count))
  answer[#answer + 1] = last
  at = at + count + 1
end
rows = string.format('%.0f', rows + #answer - 1)
redis.call('HSET', markers, partition, ARGV[2] .. ' ' .. rows .. ' ' .. digest_after .. ' ' .. last)
redis.call('PEXPIRE', markers, ttl)
if words > 0 then
  redis.call('XTRIM', stream, unpack(ARGV, 8, 7 + words))
end
return answer
