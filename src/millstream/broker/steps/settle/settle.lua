-- Settles many deliveries of one consumer with one verb: those that it still holds at the same delivery count.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for another delivery, scored by when (ms)
-- ARGV     group, consumer, times delivered, verb, number, ids in ascending order...
-- Verbs    ack; touch: idle becomes 0; start: delivered once more;
--          back: delivered `number` times, free for everybody at once; delay: not before `number` ms from now
-- Answers  {ids that were refused, 1 if the group knows the consumer, ids that were held but are deleted}
-- XCLAIM takes what is deleted off the pending list: whatever the verb, nobody can deliver it again. Only ack is too
-- late to care.
local key, due, group, me, times, verb, number = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local first, n = 6, #ARGV - 5
-- One look at the range instead of one for each id: the consumer holds little else between these ids.
local page = n + 64
local held = redis.call('XPENDING', key, group, ARGV[first], ARGV[#ARGV], page, me)
local all = #held == n
for i = 1, n do
  if not all then break end
  all = held[i][1] == ARGV[i + 5] and held[i][4] == times
end
local kept, refused, known, gone = nil, {}, 1, {}
if all and verb == 'ack' then  -- the common case, without a table of its own
  redis.call('XACK', key, group, unpack(ARGV, first))
  return {refused, known, gone}
elseif all then
  kept = {unpack(ARGV, first)}
else
  local mine = {}
  for i = 1, #held do
    if held[i][4] == times then mine[held[i][1]] = true end
  end
  kept = {}
  for i = first, #ARGV do
    local id = ARGV[i]
    local is_mine = mine[id]
    if not is_mine and #held == page then
      local one = redis.call('XPENDING', key, group, id, id, 1, me)[1]
      is_mine = one and one[4] == times
    end
    if is_mine then kept[#kept + 1] = id else refused[#refused + 1] = id end
  end
  if #refused > 0 then
    known = 0
    local consumers = redis.call('XINFO', 'CONSUMERS', key, group)
    for i = 1, #consumers do
      if consumers[i][2] == me then known = 1 end
    end
  end
end
if #kept == 0 then return {refused, known, gone} end
if verb == 'ack' then
  redis.call('XACK', key, group, unpack(kept))
else
  local words = {'XCLAIM', key, group, me, 0, unpack(kept)}
  local function add(word) words[#words + 1] = word end
  if verb == 'start' then
    add('RETRYCOUNT')
    add(times + 1)
  elseif verb == 'back' then
    add('RETRYCOUNT')
    add(number)
    add('TIME')
    add(1)
  end
  add('JUSTID')
  local claimed = redis.call(unpack(words))
  if #claimed < #kept then
    local here = {}
    for i = 1, #claimed do here[claimed[i]] = true end
    for i = 1, #kept do
      if not here[kept[i]] then gone[#gone + 1] = kept[i] end
    end
    kept = claimed
  end
end
if verb == 'delay' then
  local time = redis.call('TIME')
  local at = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + number)
  for i = 1, #kept do redis.call('ZADD', due, at, kept[i]) end
end
return {refused, known, gone}
