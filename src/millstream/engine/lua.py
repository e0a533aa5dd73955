"""Runs users' Lua scripts if the extra ``millstream[lua]`` is installed: each in its own interpreter, with limits on
time and memory.

A script can use what Redis's sandbox has (``redis``, ``string``, ``table``, ``math``). It cannot use anything that
leaves the sandbox or escapes the time limit: no ``coroutine``, no loading of code. ``cjson`` and Redis's other
libraries are not available.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from millstream.engine.numbers import INT64_MAX, INT64_MIN
from millstream.wire import NIL_ARRAY, ErrorReply, Reply, Status

if TYPE_CHECKING:
    from millstream.engine.commands.transactions import Call

MEMORY_BYTES: Final = 64 << 20
TIME_MS: Final = 1000
STEPS: Final = 100_000_000
_STEPS_AT_A_TIME: Final = 1_000
_DEPTH: Final = 100
_OUT_OF_MEMORY: Final = b"not enough memory"
_LINE_BREAKS: Final = bytes.maketrans(b"\r\n", b"  ")
"""A status reply ends with its line: a line break in it would begin another reply."""
_TIMED_OUT: Final = "millstream: the script was stopped"

_PRELUDE: Final = rb"""
local ask, expired, sha1hex = ...
local type, error, pcall, select, tostring, loadstring = type, error, pcall, select, tostring, loadstring
local sethook, len, sub, find = debug.sethook, string.len, string.sub, string.find
local max, min, rawget = math.max, math.min, rawget

local function check()
  if expired() then
    sethook(check, '', 1)  -- every further step fails too, so that the script cannot continue after a pcall
    error('millstream: the script was stopped', 0)
  end
end

-- Lua runs xpcall's handler where the error is raised. For the error of check, that is inside the hook, where no other
-- hook runs, so that nothing would stop the handler. Here it runs after the call has ended.
local function handled(handler, fine, ...)
  if fine then return true, ... end
  return false, select(2, pcall(handler, (...)))
end
function xpcall(call, handler) return handled(handler, pcall(call)) end

redis = {LOG_DEBUG = 0, LOG_VERBOSE = 1, LOG_NOTICE = 2, LOG_WARNING = 3}
function redis.error_reply(text) return {err = text} end
function redis.status_reply(text) return {ok = text} end
function redis.sha1hex(text) return sha1hex(tostring(text)) end
function redis.log() end
function redis.pcall(...) return ask(select('#', ...), ...) end
function redis.call(...)
  local reply = ask(select('#', ...), ...)
  if type(reply) == 'table' and reply.err then error(reply, 0) end
  return reply
end

-- The hook counts a library call as one step, however long it takes. So a pattern that could take too long is refused,
-- and the estimated cost of other calls is summed to check the time limit between them.
local MAX_COST, CHECK_EVERY, spent = 5e7, 1e6, 0
local function charge(cost)
  spent = spent + cost
  if spent > CHECK_EVERY then
    spent = 0
    check()
  end
end

local function is_text(value) return type(value) == 'string' or type(value) == 'number' end

-- An upper bound for the steps of matching: the text's length to the power of the number of parts that can be retried
-- (quantifiers with more pattern after them, %b, back-references, the start position), times 2 for each '?'.
local function cost_of(length, pattern, can_anchor)
  local i, last, repeats, trailing, widest, choices = 1, len(pattern), 0, 0, 0, 1
  local starts = (can_anchor and sub(pattern, 1, 1) == '^') and 0 or 1
  while i <= last do
    local c = sub(pattern, i, i)
    if c == '*' or c == '+' or c == '-' then
      repeats, trailing = repeats + trailing, 1
    elseif c == '?' then
      choices = choices * 2
    elseif c ~= '(' and c ~= ')' then
      repeats, trailing = repeats + trailing, 0
    end
    if c == '%' then
      local kind = sub(pattern, i + 1, i + 1)
      if kind == 'b' then i = i + 2 end
      if kind == 'b' or find(kind, '^%d') then repeats = repeats + 1 end
      i = i + 1
    elseif c == '[' then
      local first = i
      i = i + 1
      if sub(pattern, i, i) == '^' then i = i + 1 end
      repeat
        i = i + (sub(pattern, i, i) == '%' and 2 or 1)
      until i > last or sub(pattern, i, i) == ']'
      widest = max(widest, i - first)
    end
    i = i + 1
  end
  local exponent = repeats > 0 and repeats + starts or 1
  return length ^ exponent * (1 + widest / 8) * choices + length * last
end

for _, name in ipairs({'find', 'match', 'gmatch', 'gsub'}) do
  local plain = string[name]
  string[name] = function(text, pattern, ...)
    if is_text(text) and is_text(pattern) then
      local length, cost = len(text) + 2, 0
      if name == 'find' and select(2, ...) then
        cost = length * len(pattern)
      else
        cost = len(pattern) > 1e5 and MAX_COST * 2 or cost_of(length, tostring(pattern), name ~= 'gmatch')
      end
      if not (cost <= MAX_COST) then error('the pattern could take too long on a text of this length', 2) end
      charge(cost)
    end
    return plain(text, pattern, ...)
  end
end
for _, name in ipairs({'upper', 'lower', 'reverse'}) do
  local plain = string[name]
  string[name] = function(text, ...)
    if is_text(text) then charge(len(text)) end
    return plain(text, ...)
  end
end
local rep = string.rep
function string.rep(text, count, ...)
  if is_text(text) and type(count) == 'number' then
    if len(text) == 0 then return '' end
    charge(min(count * len(text), 1e8))
  end
  return rep(text, count, ...)
end
for name, factor in pairs({insert = 1, remove = 1, concat = 1, sort = 20}) do
  local plain = table[name]
  table[name] = function(list, ...)
    if type(list) == 'table' then charge(#list * factor) end
    return plain(list, ...)
  end
end
for _, name in ipairs({'io', 'os', 'debug', 'package', 'coroutine', 'require', 'module', 'dofile', 'loadfile', 'load',
    'loadstring', 'collectgarbage', 'newproxy', 'python', 'print'}) do
  _G[name] = nil
end
string.dump = nil

local function start(source, steps)
  local run, wrong = loadstring(source, '@user_script')
  if not run then return false, wrong end
  sethook(check, '', steps)
  local fine, result = pcall(run)
  sethook()
  return fine, result
end

-- Metamethods would run after the time limit was lifted.
local function field(value, name)
  if type(value) == 'table' then return rawget(value, name) end
end
return start, field
"""


def available() -> bool:
    try:
        import lupa.lua51  # noqa: F401  # the extra is there, or it is not
    except ImportError:
        return False
    return True


def compile_error(source: bytes) -> str | None:
    """The syntax error of the script; None if it compiles."""
    runtime = _runtime()
    load = runtime.eval(b"function(source) local run, wrong = loadstring(source, '@user_script') return wrong end")
    wrong = load(source)
    return None if wrong is None else wrong.decode("utf-8", "replace")


def _runtime() -> Any:
    from lupa import lua51

    def refuse(*_: object) -> None:
        raise AttributeError("a script may not read attributes of Python objects")

    return lua51.LuaRuntime(
        encoding=None,
        register_eval=False,
        register_builtins=False,
        unpack_returned_tuples=True,
        attribute_filter=refuse,
        max_memory=MEMORY_BYTES,
    )


def run(source: bytes, elapsed_ms: Callable[[], int], call: Call, keys: list[bytes], argv: list[bytes]) -> Reply:
    """Runs a script and returns the reply of EVAL. As in Redis, changes before an error are not rolled back."""
    import lupa.lua51

    runtime = _runtime()
    clock = _Clock(elapsed_ms)
    sandbox = _Sandbox(runtime, call)
    try:
        start, sandbox.field = runtime.compile(_PRELUDE)(sandbox.ask, clock.expired, _sha1hex)
        names = runtime.globals()
        names[b"KEYS"], names[b"ARGV"] = runtime.table_from(keys), runtime.table_from(argv)
        fine, result = start(source, _STEPS_AT_A_TIME)
        if fine:
            return sandbox.to_reply(result)
        if result == _OUT_OF_MEMORY:
            raise MemoryError
        raise ErrorReply(sandbox.error_text(result))
    except lupa.lua51.LuaError as error:
        if _TIMED_OUT in str(error):
            raise ErrorReply(f"ERR the script was stopped: it exceeded the limit of {TIME_MS} ms") from error
        raise ErrorReply(f"ERR {_one_line(str(error))}") from error
    except MemoryError as error:
        raise ErrorReply(f"ERR the script was stopped: it needed more than {MEMORY_BYTES >> 20} MB") from error


class _Clock:
    def __init__(self, elapsed_ms: Callable[[], int]) -> None:
        self._elapsed_ms = elapsed_ms
        self._until_ms = elapsed_ms() + TIME_MS
        self._looks = STEPS // _STEPS_AT_A_TIME

    def expired(self) -> bool:
        self._looks -= 1
        return self._looks < 0 or self._elapsed_ms() > self._until_ms


class _Sandbox:
    """Runs the commands of a script, and converts arguments and replies between Lua and the engine."""

    field: Callable[[Any, object], Any]
    """The field of a table without its metamethods; None for another value."""

    def __init__(self, runtime: Any, call: Call) -> None:
        from lupa import lua51

        self._runtime = runtime
        self._call = call
        self._type_of = lua51.lua_type

    def ask(self, count: int, *words: Any) -> Any:
        """Runs one command. Never raises: an error is returned as a table, which scripts expect."""
        try:
            if not count:
                raise ErrorReply("ERR Please specify at least one argument for this redis.call() call")
            return self.to_lua(self._call(*map(_word, words)))
        except ErrorReply as error:
            return self._runtime.table_from({b"err": error.text.encode("utf-8", "surrogateescape")})

    def to_lua(self, reply: Any) -> Any:
        if reply is None or reply is NIL_ARRAY:
            return False
        if isinstance(reply, Status):
            return self._runtime.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._runtime.table_from([self.to_lua(item) for item in reply])
        if isinstance(reply, float):
            return repr(reply).encode()
        return bytes(reply) if isinstance(reply, bytes) else reply

    def to_reply(self, value: Any, depth: int = 0) -> Reply:
        if depth > _DEPTH:
            raise ErrorReply("ERR reached lua stack limit")
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            # NaN and numbers beyond 64 bits become what Redis's conversion gives on x86-64.
            return int(value) if INT64_MIN <= value <= INT64_MAX else INT64_MIN
        return self._table(value, depth)

    def _table(self, table: Any, depth: int) -> Reply:
        if self._type_of(table) != "table":
            return None  # a function or another value that has no reply
        if isinstance(self.field(table, b"err"), bytes):
            raise ErrorReply(self.error_text(table))
        status = self.field(table, b"ok")
        if isinstance(status, bytes):
            return Status(status.translate(_LINE_BREAKS))
        items: list[Any] = []
        while (item := self.field(table, len(items) + 1)) is not None:
            items.append(self.to_reply(item, depth + 1))
        return items

    def error_text(self, error: Any) -> str:
        if isinstance(error, bytes):
            return f"ERR {_one_line(error.decode('utf-8', 'surrogateescape'))}"
        text = self.field(error, b"err")
        if not isinstance(text, bytes):
            return "ERR the script ended with an error that is not a text"
        message = _one_line(text.decode("utf-8", "surrogateescape").removeprefix("-"))
        return message if " " in message else f"ERR {message}"


def _word(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return b"%d" % value
    if isinstance(value, float):
        return b"%d" % int(value) if value.is_integer() and abs(value) < 1e17 else b"%.17g" % value
    raise ErrorReply("ERR Lua redis lib command arguments must be strings or integers")


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def _sha1hex(text: bytes) -> bytes:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
