"""Malformed requests: mutations of valid messages from a seed, and input that no Everstep program sends."""

from __future__ import annotations

import random
from collections.abc import Iterator

DEEP = 200_000
HUGE_BYTES = (1 << 20) + 1


def damaged(body: bytes, rng: random.Random) -> bytes:
    """Return the body after one to four mutations: bytes flipped, removed, doubled or replaced."""
    out = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        if not out:
            return b"\x00"
        at, length = rng.randrange(len(out)), rng.randint(1, 8)
        mutation = rng.randrange(5)
        if mutation == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif mutation == 1:
            del out[at : at + length]
        elif mutation == 2:
            out[at:at] = out[at : at + length]
        elif mutation == 3:
            out[at : at + length] = rng.randbytes(length)
        else:
            out[at:at] = rng.choice((b"null", b"-1", b"1e999", b'"', b"[", b"{}", b"\xff", b"9" * 30, b"\\u0000"))
    return bytes(out)


def undecodable(body: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield bodies that cannot be decoded: cut short, nested deeply, huge, not UTF-8, or another JSON value."""
    for _ in range(5):
        yield body[: rng.randrange(len(body))]
    yield b""
    yield b"[" * DEEP
    yield b'{"a":' * DEEP
    yield body[:-1] + b',"surprise":' + b"[" * DEEP
    yield b"[" * DEEP + b"]" * DEEP
    yield b" " * HUGE_BYTES
    yield b'{"a":"' + b"x" * HUGE_BYTES + b'"}'
    yield b"\xff\xfe" + body
    yield body.replace(b'"', b'"\xc3\x28', 1)
    yield b"null"
    yield b'"' + b"x" * 1000 + b'"'
    yield b"NaN"
    yield body + body
    yield b"\x00" * 100
    yield body[:-1] + b',"\\ud800":1}'


def hostile_requests() -> Iterator[bytes]:
    """Yield invalid or hostile HTTP requests, each for a connection of its own."""
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100  # TLS to a plain port
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield b"\x00" * 4096
    yield b"GET\r\n\r\n"
    yield b"GET / HTTP/9.9\r\n\r\n"
    yield b"GET /%00%zz HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"GET //[::1 HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"GET \xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"GET /v1/agents/" + b"n" * 100_000
    yield b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000
    yield b"GET / HTTP/1.1\r\nX: " + b"y" * 1_000_000
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n"
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nhello\r\n"
    yield b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nT: " + b"y" * (20 << 20)
    yield b"GET /v1/agents/n1/session HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: everstep/1\r\n\r\n"
    yield b"GET /v1/agents/n1/session HTTP/1.1\r\nAuthorization: Bearer \xff:\xff:\xff\r\nUpgrade: everstep/1\r\n\r\n"
    yield b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"agent:n1:" * 1000 + b"\r\n\r\n"
    yield b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
