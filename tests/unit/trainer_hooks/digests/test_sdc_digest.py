"""Every changed bit changes the weighted digest, and nothing else does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.native import copy_hash
from everstep_trainer.digests import digest
from everstep_trainer.digests.digest import (
    SMALL_BYTES,
    PlacedDigest,
    WeightedDigest,
    combined_digest,
    joined_digest,
    sum_of,
    tensor_digest,
    to_hex,
    to_unsigned,
    weighted_digest,
)
from everstep_trainer.digests.digest_weights import ROW_BYTES, ROW_WORDS, column_weights, row_keys
from tests.support.plugins.example_counts import examples

CPU = torch.device("cpu")
MASK = (1 << 64) - 1
SIZES = (3, 1000, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, ROW_BYTES // 4 + 5, 3 * ROW_BYTES // 4)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(torch.uint8)[byte] ^= 1 << bit


@settings(max_examples=examples(30))
@given(st.integers(0, len(SIZES) - 1), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_every_single_flipped_bit_changes_the_digest(which: int, where: float, bit: int) -> None:
    parts = tensors()
    whole = WeightedDigest(parts)
    before = whole.value()
    byte = int(where * parts[which].nbytes)
    flip(parts[which], byte, bit)
    assert whole.value() != before
    flip(parts[which], byte, bit)
    assert whole.value() == before


def test_swapped_words_rows_and_tensors_change_the_digest() -> None:
    parts = tensors()
    before = WeightedDigest(parts).value()
    words, rows = [t.clone() for t in parts], [t.clone() for t in parts]
    words[-1][[0, 1, 64, 65]] = words[-1][[64, 65, 0, 1]]
    half = ROW_BYTES // 4
    rows[-1] = torch.cat([rows[-1][half : 2 * half], rows[-1][:half], rows[-1][2 * half :]])
    twins = [parts[0].clone(), parts[0] + 1]
    assert WeightedDigest(words).value() != before
    assert WeightedDigest(rows).value() != before
    assert WeightedDigest(twins).value() != WeightedDigest(twins[::-1]).value()


@pytest.mark.parametrize("size", [5, SMALL_BYTES])
def test_digest_does_not_depend_on_memory_layout(size: int) -> None:
    """Neither an odd address nor gaps between rows: a rank with other allocations must not look divergent."""
    base = torch.randn(4 * size + 4)
    plain = base[:size].clone()
    shifted = torch.empty(size + 1)[1:]
    shifted.copy_(plain)
    strided = torch.empty(size, 2)[:, 0]
    strided.copy_(plain)
    expected = WeightedDigest([plain]).value()
    assert WeightedDigest([shifted]).value() == expected
    assert WeightedDigest([strided]).value() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_any_dtype_is_digested(dtype: torch.dtype) -> None:
    parts = tensors(dtype)
    before = WeightedDigest(parts).value()
    parts[3][-1] = 1 - parts[3][-1].to(torch.float32) if dtype != torch.bool else ~parts[3][-1]
    assert WeightedDigest(parts).value() != before


def reference(data: bytes, start: int = 0) -> int:
    """The digest word by word, in Python's integers."""
    weights = [weight & MASK for weight in column_weights(CPU).tolist()]
    total = 0
    for at, byte in enumerate(data, start):
        word = at // 8
        key = int(row_keys(word // ROW_WORDS, 1, CPU)[0]) & MASK
        half = weights[word % ROW_WORDS] >> 32 * (at // 4 % 2) & (1 << 32) - 1
        total += (byte << 8 * (at % 4)) * half * key
    return total & MASK


@settings(max_examples=examples(30), deadline=None)
@given(st.binary(max_size=70), st.integers(0, 3 * ROW_BYTES), st.integers(0, 9))
def test_digest_is_the_weighted_sum_of_words(data: bytes, start: int, shift: int) -> None:
    flat = torch.zeros(shift + len(data), dtype=torch.uint8)[shift:]
    flat.copy_(torch.tensor(list(data), dtype=torch.uint8))
    assert to_unsigned(tensor_digest(flat, offset=start)) == reference(data, start)


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64]))
def test_digests_of_ranges_add_up(data: st.DataObject, dtype: torch.dtype) -> None:
    whole = torch.randn(2 * ROW_BYTES // dtype.itemsize + 1003).to(dtype)
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=4))})
    offset = data.draw(st.integers(0, 1 << 40))
    parts = [tensor_digest(whole[a:b], offset=offset + a) for a, b in pairwise(cuts)]
    assert to_unsigned(torch.stack(parts).sum()) == to_unsigned(tensor_digest(whole, offset=offset))


@pytest.mark.parametrize("native", [copy_hash, None])
def test_joined_and_placed_digests_equal_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, native: object) -> None:
    monkeypatch.setattr(digest, "copy_hash", native)
    parts = [*tensors(), torch.randn(7, 5).t()]
    whole = tensor_digest(torch.cat([part.flatten() for part in parts]))
    at, placed = 0, []
    for part in parts:
        placed.append(PlacedDigest(part, at).of(part))
        at += part.numel()
    assert joined_digest(parts) == whole
    assert sum_of(placed) == whole


def test_combined_digest_sees_the_order() -> None:
    for size in (5, SMALL_BYTES):
        parts = [torch.randn(size), torch.randn(size)]
        assert to_hex(combined_digest(parts)) != to_hex(combined_digest(parts[::-1]))


@pytest.mark.slow
def test_compiled_function_keeps_the_digest() -> None:
    def digested(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = tensor * 2
        return doubled, tensor_digest(doubled, offset=1)

    compiled = torch.compile(digested, backend="aot_eager", fullgraph=True)
    value, digest = compiled(torch.ones(5))
    assert digest.equal(tensor_digest(value, offset=1))
    torch.library.opcheck(weighted_digest, (torch.ones(5), 3))


@pytest.mark.parametrize("bit", [7, 6, 5])
def test_even_counts_of_the_highest_bits_are_seen(bit: int) -> None:
    """With odd 64-bit weights, an even number of flips of bit 63 would cancel out."""
    words = torch.zeros(4 * ROW_WORDS, dtype=torch.int64)
    clean = to_unsigned(tensor_digest(words))
    for first in range(200):
        for other in (first + 1, first + 32, first + ROW_WORDS):
            words.zero_()
            flip(words, 8 * first + 7, bit)
            flip(words, 8 * other + 7, bit)
            assert to_unsigned(tensor_digest(words)) != clean


@pytest.mark.parametrize("start", [0, 5, ROW_BYTES - 8])
def test_digest_is_the_same_without_the_native_library(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    data = torch.randn(3 * ROW_WORDS + 77)
    native, many = tensor_digest(data, offset=start), combined_digest(tensors())
    monkeypatch.setattr(digest, "copy_hash", None)
    assert tensor_digest(data, offset=start).equal(native)
    assert combined_digest(tensors()).equal(many)
