-- Acknowledges entries of several streams: of each stream all given ones, or none.
-- KEYS[1], KEYS[2], ...  the streams: the pending lists of their groups
-- ARGV     group, consumer, then for each stream: times delivered, number of ids, ids in ascending order
-- Returns  the indexes of the streams of which none was acknowledged: the consumer does not own all of the entries with
--          that delivery count any more, or there is an error, such as a group that does not exist
local group, me, at = ARGV[1], ARGV[2], 3
local rejected = {}
for i = 1, #KEYS do
  local times, n = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local first, last = at + 2, at + 1 + n
  at = last + 1
  local pending = redis.pcall('XPENDING', KEYS[i], group, ARGV[first], ARGV[last], n + 64, me)
  local owned = {}
  for j = 1, #pending do
    if pending[j][4] == times then owned[pending[j][1]] = true end
  end
  local all_owned = true
  for j = first, last do all_owned = all_owned and owned[ARGV[j]] end
  if not all_owned or type(redis.pcall('XACK', KEYS[i], group, unpack(ARGV, first, last))) ~= 'number' then
    rejected[#rejected + 1] = i
  end
end
return rejected
