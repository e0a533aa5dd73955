-- Appends entries whose event ids were not seen in this window or the one before.
--
-- KEYS[1]  the stream; entries are added at its end
-- KEYS[2]  set of the event ids seen in the window that is open
-- KEYS[3]  set of the event ids seen in the window before
-- KEYS[4]  string: the millisecond at which the open window began, and how long it is
-- ARGV     the window in ms, number of words of a trim policy, those words,
--          and for each entry: its event id, its number of words, those words
-- Whoever asks for a shorter window than the open one does not cut it short: others were promised the longer one.
-- Returns for each entry its id, or false where the event had been seen.
local stream, seen, seen_before, began = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local window = tonumber(ARGV[1])

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

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local since, promised = string.match(redis.call('GET', began) or '', '^(%d+) (%d+)$')
local longer = since and window > tonumber(promised)
if since and not longer then
  window = tonumber(promised)
end
local age = since and now - tonumber(since)
if not age or age >= window then
  if age and age < 2 * window and redis.call('EXISTS', seen) == 1 then
    redis.call('RENAME', seen, seen_before)
    redis.call('PEXPIRE', seen_before, string.format('%.0f', window))
  else
    redis.call('DEL', seen, seen_before)
  end
  since = string.format('%.0f', now)
  redis.call('SET', began, since .. ' ' .. string.format('%.0f', window), 'PX', 2 * window)
elseif longer then
  redis.call('SET', began, since .. ' ' .. string.format('%.0f', window), 'PX', 2 * window)
end

local words = tonumber(ARGV[2])
local at = 3 + words
local answer = {}
while at <= #ARGV do
  local event, count = ARGV[at], tonumber(ARGV[at + 1])
  if redis.call('SISMEMBER', seen_before, event) == 0 and redis.call('SADD', seen, event) == 1 then
    answer[#answer + 1] = redis.call('XADD', stream, '*', unpack(ARGV, at + 2, at + 1 + count))
  else
    answer[#answer + 1] = false
  end
  at = at + count + 2
end
redis.call('PEXPIRE', seen, 2 * window)
if words > 0 then
  redis.call('XTRIM', stream, unpack(ARGV, 3, 2 + words))
end
return answer
