-- Settles deliveries of one consumer with one verb: those that it still owns with the given delivery count.
-- KEYS[1]  the stream: the pending list of its group
-- KEYS[2]  {stream}.due:<group>: sorted set, ids of entries that wait for redelivery, scored by due time (ms)
-- ARGV     group, consumer, times delivered, verb, number, ids in ascending order...
-- Verbs    ack; touch: idle time 0; start: one more delivery;
--          back: delivery count `number`, claimable at once; delay: not before `number` ms from now
-- Returns  {ids that were refused, 1 if the group knows the consumer, ids that were pending but are deleted}
-- XCLAIM removes deleted entries from the pending list, so no consumer can receive them again. An ack does not report
-- them.
local key, due, group, me, times, verb, number = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local first, n = 6, #ARGV - 5
-- One XPENDING over the range instead of one per id: the consumer has few other entries between these ids.
local page = n + 64
local pending = redis.call('XPENDING', key, group, ARGV[first], ARGV[#ARGV], page, me)
local all_owned = #pending == n
for i = 1, n do
  if not all_owned then break end
  all_owned = pending[i][1] == ARGV[i + 5] and pending[i][4] == times
end
local accepted, refused, known, gone = nil, {}, 1, {}
if all_owned and verb == 'ack' then  -- the common case, without building a table
  redis.call('XACK', key, group, unpack(ARGV, first))
  return {refused, known, gone}
elseif all_owned then
  accepted = {unpack(ARGV, first)}
else
  local owned = {}
  for i = 1, #pending do
    if pending[i][4] == times then owned[pending[i][1]] = true end
  end
  accepted = {}
  for i = first, #ARGV do
    local id = ARGV[i]
    local is_owned = owned[id]
    if not is_owned and #pending == page then
      local row = redis.call('XPENDING', key, group, id, id, 1, me)[1]
      is_owned = row and row[4] == times
    end
    if is_owned then accepted[#accepted + 1] = id else refused[#refused + 1] = id end
  end
  if #refused > 0 then
    known = 0
    local consumers = redis.call('XINFO', 'CONSUMERS', key, group)
    for i = 1, #consumers do
      if consumers[i][2] == me then known = 1 end
    end
  end
end
if #accepted == 0 then return {refused, known, gone} end
if verb == 'ack' then
  redis.call('XACK', key, group, unpack(accepted))
else
  local args = {'XCLAIM', key, group, me, 0, unpack(accepted)}
  local function add(arg) args[#args + 1] = arg end
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
  local claimed = redis.call(unpack(args))
  if #claimed < #accepted then
    local existing = {}
    for i = 1, #claimed do existing[claimed[i]] = true end
    for i = 1, #accepted do
      if not existing[accepted[i]] then gone[#gone + 1] = accepted[i] end
    end
    accepted = claimed
  end
end
if verb == 'delay' then
  local time = redis.call('TIME')
  local at = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + number)
  for i = 1, #accepted do redis.call('ZADD', due, at, accepted[i]) end
end
return {refused, known, gone}
