-- Begins with once/_marker.lua
-- Opens a transaction that appends a writer's rows natively: MULTI, this, XSETID of the gate, XADD for each row,
-- once_close, DEL of the gate, EXEC. Where the check refuses, it shuts the stream: at the greatest of all ids every XADD
-- of the transaction fails, and once_close puts the stream's own last id back. MULTI has no condition: this is one.
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers
-- KEYS[3]  the gate, which lives no longer than the transaction: stream of one entry that once_close goes by,
--          'open' with the stream's length, or 'shut' with its last id, 'none' where there was no stream.
--          It is a stream so that XSETID and DEL of it work: they are there because the server looks at permissions
--          when commands are queued, and a user who may not shut a stream must not get as far as the XADDs.
-- ARGV     as _marker.lua says
--
-- Returns {'OK'}, or a refusal of _marker.lua.
local gate, shut = KEYS[3], '18446744073709551615-18446744073709551615'
local refusal = check() or exhausted
call('DEL', gate)
if not refusal then
  call('XADD', gate, '1-1', 'open', string.format('%.0f', length))
  return { 'OK' }
end
if kind == 'stream' then
  call('XADD', gate, '1-1', 'shut', greatest)
  call('XSETID', stream, shut)
elseif kind == 'none' then
  call('XADD', gate, '1-1', 'shut', 'none')
  call('XADD', stream, 'MAXLEN', '0', shut, 'shut', '')
end
return refusal
