"""Gathered copies compared with single copies: every piece has the same bytes, and no other byte changes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.layout import slots
from everstep.native import copy_hash
from everstep_trainer.slots import copy
from everstep_trainer.slots.copy import HashingCopyBatch, SlotTargets, copy_all
from everstep_trainer.state.layout import ALIGN

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
UNTOUCHED = 0xA5

pieces = st.tuples(
    st.sampled_from([0, 1, 3, 16, 17, 500, 2048, 2049, 8192]),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "scalar", "strided", "negated"]),
    st.integers(0, 3),
)


@contextmanager
def mapped(nbytes: int) -> Iterator[torch.Tensor]:
    """Return a payload that begins behind foreign bytes, as in a segment."""
    descriptor = os.memfd_create("everstep-test")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE + nbytes)
        whole = mmap.mmap(descriptor, 0)
        yield torch.frombuffer(whole, dtype=torch.uint8)[mmap.PAGESIZE :]
        assert not any(whole[: mmap.PAGESIZE])
    finally:
        os.close(descriptor)


def make_tensor(count: int, dtype: torch.dtype, form: str) -> torch.Tensor:
    raw = torch.randint(0, 2, (2 * count,), dtype=torch.uint8).to(dtype)
    if form == "scalar":
        return torch.ones((), dtype=dtype)
    if form == "strided":
        return raw[::2]
    if form == "negated" and dtype is torch.complex64:
        return raw[:count].conj()
    return raw[:count]


CHUNK = 1 << 14
"""Small enough for several chunks per copy."""


class Plain:
    def __init__(self, targets: SlotTargets, sources: list[torch.Tensor]) -> None:
        self.copy = partial(copy_all, targets, sources)


class Hashing:
    """A copy that hashes as it copies, compared with hashes computed afterwards."""

    def __init__(self, targets: SlotTargets, sources: list[torch.Tensor]) -> None:
        assert copy_hash is not None
        assert targets.payload is not None
        self._payload = targets.payload
        with chunks_of(CHUNK):
            self._gather = HashingCopyBatch(targets.payload, targets, sources, copy_hash)

    def copy(self) -> None:
        digests = self._gather.copy()
        with chunks_of(CHUNK):
            assert digests == list(slots.chunk_digests(self._payload.numpy().data))


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (slots, copy):
            patch.setattr(module, "CHUNK_BYTES", nbytes)
        yield


KINDS = [Plain, pytest.param(Hashing, marks=pytest.mark.skipif(copy_hash is None, reason="it was not compiled"))]


@pytest.mark.promise("copy-hash")
@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(pieces, max_size=60))
def test_every_byte_of_each_piece_arrives_and_no_other(
    kind: type[Plain | Hashing], drawn: list[tuple[int, torch.dtype, str, int]]
) -> None:
    """``others`` lines between two pieces belong to other state, such as the Python state."""
    sources, starts, at = [], [], 0
    for count, dtype, form, others in drawn:
        source = make_tensor(count, dtype, form)
        at += others * ALIGN
        starts.append(at)
        sources.append(source)
        at += -(-source.nbytes // ALIGN) * ALIGN
    with mapped(at + ALIGN) as payload:
        targets = [
            payload[start : start + source.nbytes].view(source.dtype).view(source.shape)
            for start, source in zip(starts, sources, strict=True)
        ]
        gather = kind(SlotTargets(targets, payload), sources)
        for _ in range(2):
            payload.fill_(UNTOUCHED)
            gather.copy()
            expected = [source.clone().resolve_conj().resolve_neg() for source in sources]
            assert all(map(_same_bytes, targets, expected))
            assert _outside(payload, starts, sources) <= {UNTOUCHED, 0}, (
                "the gaps between the pieces of one run are padded with zeroes"
            )
            for (_, _, _, others), start in zip(drawn, starts, strict=True):
                theirs = payload[start - others * ALIGN : start]
                assert theirs.eq(UNTOUCHED).all(), "foreign bytes between two pieces must not change"
            for source in sources:  # the second copy has other values
                source.copy_(torch.zeros_like(source))


def _same_bytes(first: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()).view(torch.uint8) for t in (first, other)]
    return torch.equal(*flat)


def _outside(payload: torch.Tensor, starts: list[int], sources: list[torch.Tensor]) -> set[int]:
    mask = torch.ones_like(payload, dtype=torch.bool)
    for start, source in zip(starts, sources, strict=True):
        mask[start : start + source.nbytes] = False
    return set(payload[mask].tolist())


@pytest.mark.skipif(copy_hash is None, reason="it was not compiled")
def test_copy_by_several_threads_equals_copy_by_one() -> None:
    assert copy_hash is not None
    before = torch.get_num_threads()
    size = copy.MIN_THREAD_BYTES
    with mapped(3 * size) as payload:
        sources = [torch.arange(size // 8 + 1000, dtype=torch.int64) * k for k in (1, 3)]
        starts = [0, size + 8000]
        targets = [payload[at : at + s.nbytes].view(s.dtype) for at, s in zip(starts, sources, strict=True)]
        gather = HashingCopyBatch(payload, targets, sources, copy_hash)
        try:
            torch.set_num_threads(3)
            digests = gather.copy()
        finally:
            torch.set_num_threads(before)
        assert all(map(torch.equal, targets, sources))
        assert digests == list(slots.chunk_digests(payload.numpy().data))
