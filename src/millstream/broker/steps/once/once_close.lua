-- Begins with once/_marker.lua
-- Closes the transaction that once_open has opened: moves the marker, or makes the stream what it was before.
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers
-- KEYS[3]  the gate, as once_open says
-- ARGV     as _marker.lua says; then the number of rows
--
-- Returns {'OK', number of rows, last id}; {'SHUT'} where once_open had shut the stream; or an error where it had not,
-- and not all rows were added: the marker stays where it is then.
local noted = call('XRANGE', KEYS[3], '-', '+')[1]
local what, value = noted and noted[2][1], noted and noted[2][2]
if what == 'open' and length - tonumber(value) == tonumber(argv[7]) then
  last = greatest
  move(tonumber(argv[7]))
  return { 'OK', argv[7], last }
end
if what == 'shut' and value == 'none' then
  call('DEL', stream)
  return { 'SHUT' }
end
if what == 'shut' then
  call('XSETID', stream, value)
  return { 'SHUT' }
end
return redis.error_reply('ERR not all rows of this transaction were added, and its marker was not moved')
