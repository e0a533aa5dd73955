"""Two hundred hostile names and payloads. Each sets ``window.owned`` if it is executed."""

from __future__ import annotations

_SCRIPTS = (
    "<script>window.owned=1</script>",
    "<img src=x onerror=window.owned=1>",
    "<svg onload=window.owned=1>",
    '"><script>window.owned=1</script>',
    "'><img src=x onerror='window.owned=1'>",
    "</title><script>window.owned=1</script>",
    "</pre></textarea><script>window.owned=1</script>",
    "javascript:window.owned=1",
    '" onmouseover="window.owned=1" autofocus onfocus="window.owned=1',
    "<iframe srcdoc='<script>parent.owned=1</script>'>",
    "{{ 7*7 }}{% for x in ().__class__.__bases__ %}{% endfor %}",
    "${window.owned=1}",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<form action=//evil.example><button>",
    "<style>*{display:none}</style>",
    "<!--",
    "-->",
    "<![CDATA[",
    "&lt;script&gt;",
)
_TEXTS = (
    b"\x00",
    b"\x1b[2J\x1b[31mred",
    b"\r\n\r\nHTTP/1.1 200 OK\r\n",
    b"event: page\ndata: {}\n\n",
    b"\xff\xfe\xfd",
    b"\xed\xa0\x80",
    "\u202egnp.exe".encode(),
    "\u2066\u2067\u2068\u2069\u200f\u200e".encode(),
    ("a" + "\u0300" * 300).encode(),
    "﷽".encode() * 40,
    b"../../../../etc/passwd",
    b"%2e%2e%2f%00%0d%0a",
    b"?name=other&order=oldest#top",
    b"a" * 5_000,
    b"W" * 2_000_000,
    " \u2028\u2029\u200b".encode(),
    b"\\u003cscript\\u003e",
    b"{'a': [",
    b'{"__proto__": {"owned": 1}}',
    "\U0001d573\U0001d594\U0001d598 \U0001f3f4\u200d\u2620\ufe0f".encode(),
)


def hostile() -> list[bytes]:
    """Different names as bytes: all of the above, and combinations of them."""
    alone = [*(text.encode() for text in _SCRIPTS), *_TEXTS]
    mixed = [
        script.encode() + text[:200] + b"%d" % n
        for n, (script, text) in enumerate((script, text) for script in _SCRIPTS for text in _TEXTS[:8])
    ]
    result = [*alone, *mixed]
    assert len(result) == len(set(result)) == 200
    return result
