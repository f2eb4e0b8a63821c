"""The weighted digest: sees what hardware does to bits, and nothing else."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.sdc.digest import ROW_BYTES, SMALL_BYTES, WeightedDigest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

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
    digest = WeightedDigest(parts)
    before = digest.value()
    byte = int(where * parts[which].nbytes)
    flip(parts[which], byte, bit)
    assert digest.value() != before
    flip(parts[which], byte, bit)
    assert digest.value() == before


def test_the_same_bit_flipped_an_even_number_of_times_is_seen() -> None:
    parts = tensors()
    digest = WeightedDigest(parts)
    before = digest.value()
    for row in range(4):
        flip(parts[-1], row * ROW_BYTES // 2 + 8, 6)
    assert digest.value() != before


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
