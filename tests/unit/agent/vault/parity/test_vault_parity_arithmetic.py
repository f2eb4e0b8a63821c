"""Compare the fast codec with multiplication tables that are made from the definition of the field."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_agent.vault.parity import galois
from everstep_agent.vault.parity.shards import STRIPE_BYTES, parity_bytes
from tests.support.plugins.example_counts import examples

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def multiply(a: int, b: int) -> int:
    """Return a times b over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1, by shifts and additions."""
    result = 0
    while b:
        if b & 1:
            result ^= a
        a, b = a << 1, b >> 1
        if a & 0x100:
            a ^= 0x11D
    return result


TIMES = np.array([[multiply(a, b) for b in range(256)] for a in range(256)], np.uint8)


def power_of_two(exponent: int) -> int:
    result = 1
    for _ in range(exponent):
        result = multiply(result, 2)
    return result


def elements(data: bytes) -> Bytes:
    """Return the field's elements stripe by stripe: bit r of element b is bit b of row r."""
    stripes = np.frombuffer(data, np.uint8).reshape(-1, 8, STRIPE_BYTES // 8)
    bits = np.unpackbits(stripes, axis=2, bitorder="little")
    weights = (1 << np.arange(8, dtype=np.uint16))[None, :, None]
    sums: npt.NDArray[np.uint16] = (bits * weights).sum(axis=1, dtype=np.uint16)
    return sums.astype(np.uint8).ravel()


def in_rows(found: Bytes) -> bytes:
    """Return elements as they are stored in stripes."""
    by_stripe = found.reshape(-1, 1, STRIPE_BYTES)
    bits = (by_stripe >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return np.packbits(bits, axis=2, bitorder="little").tobytes()


def parity_by_element(members: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return P and Q, computed element by element."""
    length = parity_bytes(max(map(len, members)))
    parts = [elements(m.ljust(length, b"\0")) for m in members]
    p, q = np.zeros(length, np.uint8), np.zeros(length, np.uint8)
    for number, part in enumerate(parts):
        p ^= part
        q ^= TIMES[power_of_two(number), part]
    return in_rows(p), in_rows(q)


def encoded(members: Sequence[bytes]) -> tuple[bytearray, bytearray]:
    length = parity_bytes(max(map(len, members)))
    p, q = bytearray(b"\xaa" * length), bytearray(b"\x55" * length)
    galois.encode([memoryview(m) for m in members], memoryview(p), memoryview(q))
    return p, q


def recovered(members: Sequence[bytes], lost: Sequence[int], p: bytearray | None, q: bytearray | None) -> list[bytes]:
    left = [None if number in lost else memoryview(m) for number, m in enumerate(members)]
    into = {number: memoryview(bytearray(b"\xee" * len(members[number]))) for number in lost}
    galois.recover(left, None if p is None else memoryview(p), None if q is None else memoryview(q), into)
    return [bytes(into[number]) for number in lost]


def noise(lengths: Sequence[int], seed: int = 1) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(length) for length in lengths]


@pytest.mark.parametrize("k", range(1, 9))
def test_parity_matches_the_oracle_and_recovers_two_losses(k: int) -> None:
    members = noise([STRIPE_BYTES + 1000 * number for number in range(k)], seed=k)
    p, q = encoded(members)
    assert (bytes(p), bytes(q)) == parity_by_element(members)
    for number in range(k):
        for left in ((p, q), (p, None), (None, q)):
            assert recovered(members, [number], *left) == [members[number]]
    for lost in combinations(range(k), 2):
        assert recovered(members, lost, p, q) == [members[number] for number in lost]


lengths = st.one_of(
    st.integers(0, 40),
    st.integers(-3, 3).map(lambda off: STRIPE_BYTES + off),
    st.integers(1, 2 * STRIPE_BYTES + 100),
)


@given(st.lists(lengths, min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=examples(25))
def test_members_of_any_length_are_zero_padded(sizes: list[int], seed: int) -> None:
    members = noise(sizes, seed)
    p, q = encoded(members)
    assert (bytes(p), bytes(q)) == parity_by_element(members)
    for lost in [*combinations(range(len(members)), 1), *combinations(range(len(members)), 2)]:
        assert recovered(members, lost, p, q) == [members[number] for number in lost]


def test_one_parity_alone_may_be_written() -> None:
    members = noise([5000, 70_000, 10])
    both = encoded(members)
    p, q = bytearray(STRIPE_BYTES), bytearray(STRIPE_BYTES)
    galois.encode([memoryview(m) for m in members], p=memoryview(p))
    galois.encode([memoryview(m) for m in members], q=memoryview(q))
    assert (p, q) == both


def test_three_losses_and_wrong_lengths_are_refused() -> None:
    members = noise([100, 200, 300])
    p, q = encoded(members)
    with pytest.raises(ValueError, match="too little parity"):
        recovered(members, [0, 1, 2], p, q)
    with pytest.raises(ValueError, match="too little parity"):
        recovered(members, [0, 1], p, None)
    with pytest.raises(ValueError, match="too little parity"):
        recovered(members, [0], None, None)
    with pytest.raises(ValueError, match="has 262144, not 262145"):
        galois.encode([memoryview(members[0])], p=memoryview(bytearray(STRIPE_BYTES + 1)))
    with pytest.raises(ValueError, match="are to be recovered"):
        galois.recover([memoryview(m) for m in members], memoryview(p), memoryview(q), {})
    with pytest.raises(ValueError, match="1 to 255 members"):
        galois.encode([], memoryview(p))
