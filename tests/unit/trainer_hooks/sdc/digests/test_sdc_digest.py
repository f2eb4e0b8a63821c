"""The weighted digest: sees what hardware does to bits, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from everstep_trainer.sdc.digests import digest
from everstep_trainer.sdc.digests.digest import (
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
from everstep_trainer.sdc.digests.digest_weights import CACHED_ROWS, ROW_BYTES, ROW_WORDS, column_weights, row_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

CPU = torch.device("cpu")
MASK = (1 << 64) - 1
SIZES = (3, 1000, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, ROW_BYTES // 4 + 5, 3 * ROW_BYTES // 4)


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(torch.uint8)[byte] ^= 1 << bit


def test_equal_bytes_have_equal_digests() -> None:
    assert WeightedDigest(tensors()).value() == WeightedDigest(tensors()).value()


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


def test_the_same_bit_flipped_an_even_number_of_times_is_seen() -> None:
    parts = tensors()
    whole = WeightedDigest(parts)
    before = whole.value()
    for row in range(4):
        flip(parts[-1], row * ROW_BYTES // 2 + 8, 6)
    assert whole.value() != before


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
    """Neither an odd address nor gaps between rows: a rank that allocated otherwise must not look like a liar."""
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


def test_empty_tensor_list_has_a_digest() -> None:
    assert WeightedDigest([]).value() == 0


def reference(data: bytes, start: int = 0) -> int:
    """The digest word by word, in Python's integers."""
    weights = [one & MASK for one in column_weights(CPU).tolist()]
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


@pytest.mark.parametrize("native", [digest.copy_hash, None])
def test_joined_and_placed_digests_equal_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, native: object) -> None:
    monkeypatch.setattr(digest, "copy_hash", native)
    parts = [*tensors(), torch.randn(7, 5).t()]
    whole = tensor_digest(torch.cat([one.flatten() for one in parts]))
    at, placed = 0, []
    for part in parts:
        placed.append(PlacedDigest(part, at).of(part))
        at += part.numel()
    assert joined_digest(parts) == whole
    assert sum_of(placed) == whole


def test_row_keys_are_the_same_beyond_the_cache() -> None:
    assert row_keys(CACHED_ROWS - 2, 4, CPU)[:2].equal(row_keys(CACHED_ROWS - 2, 2, CPU))
    assert (row_keys(0, CACHED_ROWS, CPU) & 1).all()
    assert row_keys(0, CACHED_ROWS, CPU).unique().numel() == CACHED_ROWS


def test_combined_digest_equals_that_of_a_fixed_list() -> None:
    for parts in (tensors(), tensors(torch.bfloat16), [], [torch.ones(2, 3).T, torch.tensor(True), torch.empty(0)]):
        assert to_unsigned(combined_digest(parts)) == WeightedDigest(parts).value()


def test_combined_digest_sees_the_order() -> None:
    for size in (5, SMALL_BYTES):
        parts = [torch.randn(size), torch.randn(size)]
        assert to_hex(combined_digest(parts)) != to_hex(combined_digest(parts[::-1]))


def test_hex_digest_has_16_digits() -> None:
    assert to_hex(torch.tensor(-1)) == "f" * 16
    assert to_hex(torch.tensor(10)) == "000000000000000a"


def test_gradients_and_parameters_are_digested_as_they_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert not tensor_digest(parameter).requires_grad
    assert tensor_digest(parameter).equal(tensor_digest(torch.ones(3)))
    assert tensor_digest(torch.ones(3, dtype=torch.complex64).conj()).item()


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
    """Odd weights of 64 bits would differ in nothing that is left of their products with bit 63."""
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
