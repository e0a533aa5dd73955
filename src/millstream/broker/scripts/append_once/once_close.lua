-- Begins with append_once/_marker.lua
-- Ends the transaction that once_open has started: moves the marker, or restores the stream as it was before.
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers
-- KEYS[3]  the gate, see once_open
-- ARGV     see _marker.lua; then the number of rows
--
-- Returns {'OK', number of rows, last id}; {'SHUT'} if once_open refused; or an error if it did not refuse and not all
-- rows were added: then the marker is not moved.
local state = call('XRANGE', KEYS[3], '-', '+')[1]
local outcome, value = state and state[2][1], state and state[2][2]
if outcome == 'open' and length - tonumber(value) == tonumber(argv[7]) then
  last = greatest
  move(tonumber(argv[7]))
  return { 'OK', argv[7], last }
end
if outcome == 'shut' and value == 'none' then
  call('DEL', stream)
  return { 'SHUT' }
end
if outcome == 'shut' then
  call('XSETID', stream, value)
  return { 'SHUT' }
end
return redis.error_reply('ERR not all rows of this transaction were added, and its marker was not moved')
