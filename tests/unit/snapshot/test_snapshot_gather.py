"""Gathered copies against copies one by one: the same bytes in every piece, and none anywhere else."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.snapshot.gather import RUN_BYTES, SMALL_BYTES, Gather
from trainer_hooks.snapshot.layout import ALIGN

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
UNTOUCHED = 0xA5

pieces = st.tuples(
    st.sampled_from([0, 1, 3, 16, 17, 500, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, RUN_BYTES // 4]),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "scalar", "strided", "negated"]),
    st.integers(0, 3),
)


def made(count: int, dtype: torch.dtype, form: str) -> torch.Tensor:
    raw = torch.randint(0, 2, (2 * count,), dtype=torch.uint8).to(dtype)
    if form == "scalar":
        return torch.ones((), dtype=dtype)
    if form == "strided":
        return raw[::2]
    if form == "negated" and dtype is torch.complex64:
        return raw[:count].conj()
    return raw[:count]


@settings(deadline=None)
@given(st.lists(pieces, max_size=60))
def test_every_byte_of_each_piece_arrives_and_none_beside_it(drawn: list[tuple[int, torch.dtype, str, int]]) -> None:
    """``others`` lines between two pieces belong to somebody else, as the Python state does."""
    sources, starts, at = [], [], 0
    for count, dtype, form, others in drawn:
        source = made(count, dtype, form)
        at += others * ALIGN
        starts.append(at)
        sources.append(source)
        at += -(-source.nbytes // ALIGN) * ALIGN
    payload = torch.full((at + ALIGN,), UNTOUCHED, dtype=torch.uint8)
    targets = [
        payload[start : start + source.nbytes].view(source.dtype).view(source.shape)
        for start, source in zip(starts, sources, strict=True)
    ]
    gather = Gather(targets, sources)
    for _ in range(2):
        payload.fill_(UNTOUCHED)
        gather.copy()
        expected = [source.clone().resolve_conj().resolve_neg() for source in sources]
        assert all(map(_same_bytes, targets, expected))
        assert _outside(payload, starts, sources) <= {UNTOUCHED, 0}, "between pieces of one run there are zeroes"
        for (_, _, _, others), start in zip(drawn, starts, strict=True):
            theirs = payload[start - others * ALIGN : start]
            assert theirs.eq(UNTOUCHED).all(), "what is between two pieces and no padding is left alone"
        for source in sources:  # and with other values the next time
            source.copy_(torch.zeros_like(source))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def _outside(payload: torch.Tensor, starts: list[int], sources: list[torch.Tensor]) -> set[int]:
    mask = torch.ones_like(payload, dtype=torch.bool)
    for start, source in zip(starts, sources, strict=True):
        mask[start : start + source.nbytes] = False
    return set(payload[mask].tolist())


def test_the_pieces_of_a_state_of_small_tensors_go_in_a_few_calls() -> None:
    payload = torch.zeros(1000 << 10, dtype=torch.uint8)
    sources = [torch.randn(256) for _ in range(1000)]
    targets = [payload[i << 10 : (i + 1) << 10].view(torch.float32) for i in range(1000)]
    gather = Gather(targets, sources)
    assert len(gather._runs) == -(-1000 // (RUN_BYTES >> 10))
    assert not gather._sources
