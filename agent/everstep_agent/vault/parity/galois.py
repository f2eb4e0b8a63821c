"""RAID-6 arithmetic over buffers: compute P and Q of k members, and recover any two of the k + 2 from the others.

P is the sum and Q the sum of ``g^i`` times member i, over GF(2^8) with the polynomial 0x11d and g = 2 (H. P. Anvin, The
mathematics of RAID-6, 2004). A field element's bits do not lie in one byte. A *stripe* of STRIPE_BYTES is eight rows,
and bit b of row r is bit r of element b. So a sum is a plain XOR of words. Doubling moves each row one up, without
touching it, and adds the last row to rows 0, 2, 3 and 4. Doubling takes three row operations of eight; doubling the
bytes of a word in place takes five passes over all of them. Rows stay in the second-level cache. A member that ends
before another one counts as followed by zeros; parity is a whole number of stripes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from everstep_agent.vault.parity.shards import MAX_MEMBERS, STRIPE_BYTES, parity_bytes

Rows = npt.NDArray[np.uint64]  # array of shape (ROWS, ROW_WORDS)
ROWS = 8
ROW_WORDS = STRIPE_BYTES // ROWS // 8
_REDUCTION = 0x1D  # x^8 = x^4 + x^3 + x^2 + 1: the terms to which a row shifted out at the top is added


def encode(members: Sequence[memoryview], p: memoryview | None = None, q: memoryview | None = None) -> None:
    """Write P, Q, or both, each of the longest member's ``parity_bytes``; a member's index is its coefficient. All
    buffers start at the same offset of their shards, a whole number of stripes."""
    _check(members, (p, q))
    work = _StripeBuffers(len(members))
    for at in range(0, parity_bytes(max(map(len, members))), STRIPE_BYTES):
        rows = [work.stripe(member, at, number) for number, member in enumerate(members)]
        if p is not None:
            _sum(rows, _rows(p, at))
        if q is not None:
            _weighted_sum(rows, _rows(q, at), work.ladder)


def recover(
    members: Sequence[memoryview | None], p: memoryview | None, q: memoryview | None, lost: Mapping[int, memoryview]
) -> None:
    """Write the one or two members that are None into their buffers in ``lost``, each as long as its member. ``p`` and
    ``q`` are as in ``encode``, or None if lost; ``encode`` makes lost parity again."""
    missing = sorted(lost)
    given = [number for number, member in enumerate(members) if member is not None]
    if not missing or sorted([*missing, *given]) != list(range(len(members))):
        raise ValueError(f"members {missing} are to be recovered, and these are given: {given}")
    if len(missing) > sum(parity is not None for parity in (p, q)):
        raise ValueError(f"{len(missing)} members are lost and too little parity is left to recover them")
    complete = [lost[number] if member is None else member for number, member in enumerate(members)]
    _check(complete, (p, q))
    work = _StripeBuffers(len(members))
    for at in range(0, parity_bytes(max(map(len, lost.values()))), STRIPE_BYTES):
        rows = [None if m is None else work.stripe(m, at, number) for number, m in enumerate(members)]
        found = _solve(rows, missing, None if p is None else _rows(p, at), None if q is None else _rows(q, at), work)
        for number, data in zip(missing, found, strict=True):
            room = lost[number][at : at + STRIPE_BYTES]
            room[:] = data.view(np.uint8).ravel().data[: len(room)]


def _check(members: Sequence[memoryview], parity: Sequence[memoryview | None]) -> None:
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise ValueError(f"a group has 1 to {MAX_MEMBERS} members, not {len(members)}")
    need = parity_bytes(max(map(len, members)))
    for row in parity:
        if row is not None and len(row) != need:
            raise ValueError(f"parity of members of up to {max(map(len, members))} bytes has {need}, not {len(row)}")


# One stripe


def _rows(buffer: memoryview, at: int) -> Rows:
    return np.frombuffer(buffer, np.uint64, STRIPE_BYTES // 8, at).reshape(ROWS, ROW_WORDS)


class _StripeBuffers:
    """Memory for one stripe's intermediate results, allocated once."""

    def __init__(self, members: int) -> None:
        self.ladder = np.empty((ROWS + members, ROW_WORDS), np.uint64)
        self.sums = np.empty((4, ROWS, ROW_WORDS), np.uint64)
        self._padded: dict[int, Rows] = {}

    def stripe(self, member: memoryview, at: int, number: int) -> Rows | None:
        """Return the member's rows, padded with zeros if it ends inside the stripe; None if it ended before."""
        if at + STRIPE_BYTES <= len(member):
            return _rows(member, at)
        if at >= len(member):
            return None
        rows = self._padded.setdefault(number, np.zeros((ROWS, ROW_WORDS), np.uint64))
        rows.view(np.uint8).ravel().data[: len(member) - at] = member[at:]
        return rows


def _sum(members: Sequence[Rows | None], into: Rows) -> None:
    present = [rows for rows in members if rows is not None]
    if len(present) < 2:
        into[:] = present[0] if present else 0
        return
    np.bitwise_xor(present[0], present[1], out=into)
    for rows in present[2:]:
        np.bitwise_xor(into, rows, out=into)


def _weighted_sum(members: Sequence[Rows | None], into: Rows, ladder: Rows) -> None:
    """Compute the sum of 2^i times member i, by Horner's rule; doubling moves the sum one row down the ladder."""
    at = max((number for number, rows in enumerate(members) if rows is not None), default=-1)
    sum_so_far = members[at] if at >= 0 else None
    if at < 1 or sum_so_far is None:
        into[:] = 0 if sum_so_far is None else sum_so_far
        return
    for number in range(at - 1, -1, -1):
        target = ladder[number : number + ROWS] if number else into
        _double_and_add(sum_so_far, members[number], target)
        sum_so_far = target


def _double_and_add(rows: Rows, other: Rows | None, into: Rows) -> None:
    """``into`` may overlap ``rows`` if row r of the one is row r - 1 of the other."""
    top = rows[ROWS - 1]
    if other is None:
        into[1:], into[0] = rows[: ROWS - 1], top
    else:
        np.bitwise_xor(rows[: ROWS - 1], other[1:], out=into[1:])
        np.bitwise_xor(top, other[0], out=into[0])
    np.bitwise_xor(into[2:5], top, out=into[2:5])


def _solve(
    members: Sequence[Rows | None], missing: Sequence[int], p: Rows | None, q: Rows | None, work: _StripeBuffers
) -> list[Rows]:
    """Return the missing members. With A = P + its sum over the others and B = Q + its weighted sum over the others::

    A = x + y, B = g^i x + g^j y     =>     x = (g^j A + B) / (g^i + g^j), y = A + x
    """
    a, b, x, y = work.sums
    if p is not None:
        _sum(members, a)
        np.bitwise_xor(a, p, out=a)
        if len(missing) == 1:
            return [a]
    assert q is not None
    _weighted_sum(members, b, work.ladder)
    np.bitwise_xor(b, q, out=b)
    first = _power(missing[0])
    if len(missing) == 1:
        _combine([(b, _inverse(first))], x)
        return [x]
    second = _power(missing[1])
    share = _inverse(first ^ second)
    _combine([(a, _product(second, share)), (b, share)], x)
    np.bitwise_xor(a, x, out=y)
    return [x, y]


def _combine(terms: Sequence[tuple[Rows, int]], into: Rows) -> None:
    """Sum the terms, each of them rows times a constant: each result row is the XOR of some of their rows."""
    for row in range(ROWS):
        _sum([rows[column] for rows, constant in terms for column in _columns(constant, row)], into[row])


# Field operations


def _product(a: int, b: int) -> int:
    result = 0
    for bit in range(ROWS - 1, -1, -1):
        result = (result << 1 & 0xFF) ^ (_REDUCTION if result & 0x80 else 0) ^ (a if b >> bit & 1 else 0)
    return result


@cache
def _columns(constant: int, row: int) -> tuple[int, ...]:
    """Return the bits of an element that make up bit ``row`` of its product with the constant."""
    return tuple(column for column in range(ROWS) if _product(constant, 1 << column) >> row & 1)


@cache
def _power(exponent: int) -> int:
    return _product(2, _power(exponent - 1)) if exponent else 1


@cache
def _inverse(a: int) -> int:
    return next(b for b in range(1, 256) if _product(a, b) == 1)
