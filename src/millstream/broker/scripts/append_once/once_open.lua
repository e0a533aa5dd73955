-- Begins with append_once/_marker.lua
-- Starts a transaction that appends a writer's rows with native commands: MULTI, this script, XSETID of the gate, XADD
-- for each row, once_close, DEL of the gate, EXEC. MULTI has no condition, so if the check refuses, this script sets the
-- stream's last id to the greatest possible id: then every XADD of the transaction fails, and once_close restores the id.
--
-- KEYS[1]  the stream
-- KEYS[2]  the writer's markers
-- KEYS[3]  the gate, which exists only during the transaction: a stream of one entry for once_close, 'open' with the
--          stream's length, or 'shut' with its last id, 'none' if there was no stream.
--          It is a stream so that XSETID and DEL of it are valid. They are in the transaction because the server checks
--          permissions when commands are queued: for a user without permission for XSETID, no XADD must be executed.
-- KEYS[4]  optional: the owner record that fences the transaction, in the stream's slot
-- ARGV     see _marker.lua; then the number of rows, and the owner record that KEYS[4] must hold
--
-- Returns {'OK'}, {'FENCED'} if the owner record is another, or a refusal of _marker.lua.
local gate, shut = KEYS[3], '18446744073709551615-18446744073709551615'
local refusal
if KEYS[4] and call('GET', KEYS[4]) ~= argv[8] then
  refusal = { 'FENCED' }
else
  refusal = check() or exhausted
end
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
