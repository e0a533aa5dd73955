-- The event ids of the current and the previous window. Uses the last three of KEYS and the first of ARGV.
--
-- KEYS[-3]  set of the event ids of the current window
-- KEYS[-2]  set of the event ids of the previous window
-- KEYS[-1]  string: the millisecond at which the current window began, and its length
-- ARGV[1]   the window in ms
-- A caller with a shorter window does not shorten the current one, because other callers rely on the longer one.
--
-- Call `open_window(now)` first, `is_new(event)` for each event, and `keep_window()` last. A seen event causes a write too:
-- WAIT may follow, and servers newer than Redis 7.0 wait only for writes of the same connection.
local seen, seen_before, began = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
local window = tonumber(ARGV[1])

local function milliseconds(number) return string.format('%.0f', number) end

local function open_window(now)
  local since, promised = string.match(redis.call('GET', began) or '', '^(%d+) (%d+)$')
  local longer = since and window > tonumber(promised)
  if since and not longer then
    window = tonumber(promised)
  end
  local age = since and now - tonumber(since)
  if not age or age >= window then
    if age and age < 2 * window and redis.call('EXISTS', seen) == 1 then
      redis.call('RENAME', seen, seen_before)
      redis.call('PEXPIRE', seen_before, milliseconds(window))
    else
      redis.call('DEL', seen, seen_before)
    end
    redis.call('SET', began, milliseconds(now) .. ' ' .. milliseconds(window))
  elseif longer then
    redis.call('SET', began, since .. ' ' .. milliseconds(window))
  end
end

local function is_new(event)
  return redis.call('SISMEMBER', seen_before, event) == 0 and redis.call('SADD', seen, event) == 1
end

local function keep_window()
  redis.call('PEXPIRE', seen, milliseconds(2 * window))
  redis.call('PEXPIRE', began, milliseconds(2 * window))
end

