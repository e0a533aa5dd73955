"""Lua scripts of applications: with the extra they run as on Redis, within limits; without it they are an error."""

from __future__ import annotations

import pytest
from raw_client import Client

from millstream.broker.embedded import Embedded
from millstream.testing.servers import ServeProcess
from millstream.wire.commands import ErrorReply

WITHOUT_LUA = "import sys; sys.modules['lupa'] = None"

SCRIPTS = [
    ("return {ok = 'a\\r\\n-ERR b'}", ()),
    ("return redis.status_reply('a\\n+OK')", ()),
    ("return {err = 'ERR a\\r\\n+OK'}", ()),
    ("return {1, false, true, {false}, 2}", ()),
    (
        "local ok, e = xpcall(function() error('x', 0) end, function(e) return e .. '!' end) return {tostring(ok), e}",
        (),
    ),
    ("return {select(2, xpcall(function() return 1, 2 end, error))}", ()),
    ("return {1e300, -1e300, 0 / 0, 1 / 0, 2 ^ 53, -3.9}", ()),
    ("return 1", ()),
    ("return 3.99", ()),
    ("return -3.99", ()),
    ("return 'x'", ()),
    ("return true", ()),
    ("return false", ()),
    ("return nil", ()),
    ("return {1, 'two', {3, false, 4}, true}", ()),
    ("return {1, nil, 3}", ()),
    ("return {ok = 'fine'}", ()),
    ("return {err = 'MY error'}", ()),
    ("return redis.status_reply('S')", ()),
    ("return redis.error_reply('MY error')", ()),
    ("return {KEYS[1], ARGV[1], #KEYS, #ARGV}", ("k", "a")),
    ("return redis.call('SET', KEYS[1], ARGV[1])", ("k", "a\0b")),
    ("return redis.call('GET', KEYS[1])", ("k", "")),
    ("return redis.call('GET', 'nothing')", ()),
    ("return redis.call('INCR', KEYS[1]) + 0.5", ("n", "")),
    ("redis.call('XADD', KEYS[1], '1-1', 'a', ARGV[1]); return redis.call('XRANGE', KEYS[1], '-', '+')", ("s", "v")),
    (
        "redis.call('DEL', KEYS[1]); redis.call('HSET', KEYS[1], 'n', 12); return redis.call('HGETALL', KEYS[1])",
        ("h", ""),
    ),
    ("local r = redis.pcall('INCR', KEYS[1]); return r.err", ("h", "")),
    ("local ok, e = pcall(redis.call, 'INCR', KEYS[1]); return ok", ("h", "")),
    ("return redis.sha1hex('abc')", ()),
    ("return string.format('%5.2f|%s', 3.14159, 'x')", ()),
    ("return {('a,b,c'):gsub(',', ';')}", ()),
    ("local t = {3,1,2}; table.sort(t); return t", ()),
    ("return math.floor(7.7)", ()),
    ("return tostring(1e15)", ()),
    ("return #ARGV", ("k", "x")),
]


@pytest.fixture(scope="module")
def ours():
    pytest.importorskip("lupa.lua51")
    with ServeProcess() as process:
        yield process


@pytest.mark.parametrize(("script", "words"), SCRIPTS, ids=[script[:40] for script, _ in SCRIPTS])
def test_script_replies_equal_those_of_redis(ours, redis_server, script, words):
    with Client(ours.port) as mine, Client(redis_server.port) as theirs:
        for client in (mine, theirs):
            client.ask("MSET", "n", "5", "k", "before")
            if words[:1] == ("s",):
                client.ask("DEL", "s")
        if words and words[0] == "h":
            for client in (mine, theirs):
                client.ask("DEL", "h")
                client.ask("HSET", "h", "a", "b")
        call = ("EVAL", script, len(words[:1]), *words)
        assert mine.ask(*call) == theirs.ask(*call)


@pytest.mark.parametrize(
    "script",
    ["return redis.call('INCR', 'h')", "error('oops')", "return nothing.at.all", "return redis.call('NOPE')", "x x"],
)
def test_script_failure_is_an_error_reply(ours, redis_server, script):
    with Client(ours.port) as mine, Client(redis_server.port) as theirs:
        for client in (mine, theirs):
            client.ask("DEL", "h")
            client.ask("HSET", "h", "a", "b")
        a, b = mine.ask("EVAL", script, 0), theirs.ask("EVAL", script, 0)
        assert isinstance(a, ErrorReply)
        assert a.text.split(" ")[0] == b.text.split(" ")[0]
        assert mine.ask("PING") == b"PONG"


def test_loaded_scripts_are_called_by_their_digest(ours, redis_server):
    for port in (ours.port, redis_server.port):
        with Client(port) as client:
            sha = client.ask("SCRIPT", "LOAD", "return ARGV[1]")
            assert client.ask("EVALSHA", sha, 0, "x") == b"x"
            assert client.ask("SCRIPT", "EXISTS", sha, "0" * 40) == [1, 0]
            assert client.ask("SCRIPT", "LOAD", "x x").text.startswith("ERR Error compiling script (new function)")
            client.ask("SCRIPT", "FLUSH")
            assert client.ask("EVALSHA", sha, 0, "x").text.startswith("NOSCRIPT")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("while true do end", "stopped"),
        ("while true do pcall(function() while true do end end) end", "stopped"),
        ("local t = {} while true do t[#t + 1] = string.rep('x', 100000) .. #t end", "stopped"),
        ("return string.rep('x', 1000000000)", "MB"),
        ("return ('a'):rep(100000):find(('a*'):rep(40) .. 'b')", "too long"),
        ("return ('a'):rep(60000):find('a*b')", "too long"),
        ("return ('('):rep(60000):find('%b()')", "too long"),
        ("return ('a'):rep(60000):gmatch('^a*b')()", "too long"),
        ("return ('a'):rep(30000):find(('a'):rep(20000) .. 'b', 1, true)", "too long"),
        ("return ('a'):find(('a-'):rep(1000000))", "too long"),
        ("return (''):find(('*'):rep(90000))", "too long"),
        ("local t = ('a'):rep(7000) while true do t:find('a*b') end", "stopped"),
        ("local t = ('a'):rep(20000000) while true do t:upper() end", "stopped"),
        (
            "local t = {} for i = 1, 1000000 do t[i] = i end while true do table.insert(t, 1, table.remove(t, 1)) end",
            "stopped",
        ),
        ("while true do (''):rep(1000000000) end", "stopped"),
        ("xpcall(function() error('x') end, function() while true do end end)", "stopped"),
        ("xpcall(function() while true do end end, function() while true do end end)", "stopped"),
        ("xpcall(function() error('x') end, function() error('y') end) while true do end", "stopped"),
        ("error(setmetatable({}, {__index = function() while true do end end}))", "not a text"),
        ("return coroutine.wrap(function() while true do end end)()", "coroutine"),
        ("return io.open('/etc/passwd')", "io"),
        ("return os.execute('true')", "os"),
        ("return loadstring('return 1')()", "loadstring"),
        ("return debug.getinfo(1)", "debug"),
        ("return python.eval('1')", "python"),
        ("return require('os')", "require"),
        ("local t = {} t[1] = t return t", "limit"),
    ],
)
def test_script_is_limited_in_time_and_memory(ours, script, why):
    with Client(ours.port) as client:
        reply = client.ask("EVAL", script, 0)
        assert isinstance(reply, ErrorReply)
        assert why in reply.text
        assert client.ask("EVAL", "return 1", 0) == 1


@pytest.mark.parametrize(
    "script",
    [
        "return {('GET https://x/' .. ('a'):rep(100000)):find('https?://')}",
        "return {('1'):rep(100000):gsub('%d+', 'x')}",
        "return {('a b '):rep(20000):gsub(' ', '')}",
        "return {(' x '):match('^%s*(.-)%s*$')}",
    ],
)
def test_common_patterns_on_long_texts_are_allowed(ours, redis_server, script):
    with Client(ours.port) as mine, Client(redis_server.port) as theirs:
        assert mine.ask("EVAL", script, 0) == theirs.ask("EVAL", script, 0)


def test_script_effects_are_in_the_journal(tmp_path):
    pytest.importorskip("lupa.lua51")
    embedded = Embedded(directory=tmp_path, housekeeping=False)
    embedded.execute(embedded.session(), (b"EVAL", b"redis.call('SET', KEYS[1], math.random())", b"1", b"k"))
    value = embedded.execute(embedded.session(), (b"GET", b"k"))
    embedded.close()
    again = Embedded(directory=tmp_path, housekeeping=False)
    assert value is not None
    assert again.execute(again.session(), (b"GET", b"k")) == value
    again.close()


def test_script_error_without_the_extra_says_what_to_install():
    with ServeProcess(planted=WITHOUT_LUA) as process, Client(process.port) as client:
        for words in (("EVAL", "return 1", 0), ("SCRIPT", "LOAD", "return 1")):
            assert "millstream[lua]" in client.ask(*words).text
        assert client.ask("EVALSHA", "0" * 40, 0).text.startswith("NOSCRIPT")


def test_metamethods_of_a_result_are_not_called(ours):
    with Client(ours.port) as client:
        assert client.ask("EVAL", "return setmetatable({5}, {__index = function() while true do end end})", 0) == [5]
