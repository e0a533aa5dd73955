-- Makes pending entries of a consumer whose process has ended claimable at once, one page per call.
-- KEYS[1]  the stream: the pending list of its group
-- ARGV     group, consumer, cursor, entries per page
-- Returns  {next cursor (0-0: that was the last page), number of entries}
-- Only the idle time changes: the entries keep their consumer and their delivery counts. Atomic: an entry that another
-- consumer has claimed meanwhile is not in the page, and is not changed. XCLAIM drops deleted entries.
local page = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
if #page == 0 then return {'0-0', 0} end
local args = {'XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0}
for i = 1, #page do args[#args + 1] = page[i][1] end
args[#args + 1] = 'TIME'
args[#args + 1] = 1
args[#args + 1] = 'JUSTID'
local released = redis.call(unpack(args))
if #page < tonumber(ARGV[4]) then return {'0-0', #released} end
return {'(' .. page[#page][1], #released}
