-- append_once for rows with the same fields in all of them: names travel once, and of the ids only the last comes back.
--
-- KEYS[1]  the stream; entries are added at its end
-- KEYS[2]  the writer's markers: hash of partition to 'version rows digest last-id'
-- ARGV     partition, version, position, digest before, digest after, time to live in ms,
--          number of names, those names, and for each row its values in the order of the names
-- A digest of '-' is not known, and is not compared.
--
-- Returns {'OK', number of rows, last id}, or, having written nothing,
--   {'STALE', version}, {'ROWS', rows, digest, last-id}, {'DIGEST'}      as append_once does
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
if kind == 'stream' then
  local facts = call('XINFO', 'STREAM', stream)
  for i = 1, #facts, 2 do
    if facts[i] == 'last-generated-id' and facts[i + 1]:sub(1, 21) == '18446744073709551615-' then
      return redis.error_reply('ERR The stream has exhausted the last possible ID, unable to add more items')
    end
  end
end

local width = tonumber(argv[7])
local first = 8 + width
local count = (#argv - first + 1) / width
if width == 1 then
  local name = argv[8]
  for at = first, #argv do
    last = call('XADD', stream, '*', name, argv[at])
  end
else
  local words = { stream, '*' }
  for i = 1, width do words[2 * i + 1] = argv[7 + i] end
  for at = first, #argv, width do
    for i = 1, width do words[2 * i + 2] = argv[at + i - 1] end
    last = call('XADD', unpack(words))
  end
end
rows = string.format('%.0f', rows + count)
call('HSET', markers, partition, argv[2] .. ' ' .. rows .. ' ' .. digest_after .. ' ' .. last)
call('PEXPIRE', markers, ttl)
return { 'OK', string.format('%.0f', count), last }
