"""Copies that hash, compared with separate copies and hashes: equal bytes and digests, nothing written beside them."""

from __future__ import annotations

import platform
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hatch_build
from everstep.native import ENV_VARIABLE, LIBRARY, MIN_BYTES, CopyHash, copy_hash
from tests.support.plugins.example_counts import examples

MOST_BYTES = 9000
"""More than eight blocks of 1,024, in which everything that a longer input has happens."""
GUARD = 64
RANDOM = np.random.default_rng(7)
MEMORY = RANDOM.integers(0, 256, 2 * MOST_BYTES, dtype=np.uint8)

lengths = st.one_of(
    st.sampled_from([MIN_BYTES, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 4096, 8192]),
    st.integers(MIN_BYTES, MOST_BYTES),
)
offsets = st.sampled_from([0, 1, 8, 31, 32, 63, 64])


@pytest.fixture(scope="module")
def native() -> CopyHash:
    if copy_hash is None:
        pytest.skip(f"no {LIBRARY.name} here: no C compiler when it was installed, or no AVX2")
    return copy_hash


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.promise("copy-hash")
@settings(max_examples=examples(100))
@given(lengths, offsets, st.lists(st.tuples(st.integers(0, MOST_BYTES), lengths, offsets), max_size=6))
@example(1024, 0, [])
@example(8192, 0, [(0, 8192, 0)])
@example(8192, 0, [(0, 8192, 1)])
def test_scatter_copies_parts_and_hashes_the_source(
    native: CopyHash, length: int, start: int, drawn: list[tuple[int, int, int]]
) -> None:
    """Parts may overlap, and be anywhere."""
    source = MEMORY[start : start + length]
    parts = sorted((at % length, min(size, length - at % length), off) for at, size, off in drawn)
    targets = [np.zeros(GUARD + off + size + GUARD, np.uint8) for _, size, off in parts]
    froms, sizes = column([at for at, _, _ in parts]), column([size for _, size, _ in parts])
    places = column([target.ctypes.data + GUARD + off for target, (_, _, off) in zip(targets, parts, strict=True)])
    columns = (froms.ctypes.data, places.ctypes.data, sizes.ctypes.data)
    assert native.scatter(source.ctypes.data, length, *columns, len(parts)) == xxhash.xxh3_128_digest(source.data)
    for target, (at, size, off) in zip(targets, parts, strict=True):
        begin = GUARD + off
        assert np.array_equal(target[begin : begin + size], source[at : at + size])
        assert not target[:begin].any()
        assert not target[begin + size :].any()


@pytest.mark.promise("copy-hash")
@settings(max_examples=examples(100))
@given(lengths, offsets, st.lists(st.tuples(st.integers(0, MOST_BYTES), offsets), max_size=8))
@example(8192, 0, [(0, 0), (8192, 0)])
@example(8192, 1, [(0, 1), (8192, 1)])
def test_gather_fills_places_and_hashes_the_whole_target(
    native: CopyHash, length: int, start: int, drawn: list[tuple[int, int]]
) -> None:
    """Every second stretch between the drawn places is filled; the others stay as they were."""
    memory = np.full(GUARD + start + length + GUARD, 0xA5, np.uint8)
    target = memory[GUARD + start : GUARD + start + length]
    target[:] = MEMORY[-length:]
    expected = target.copy()
    ends = sorted({min(at, length) for at, _ in drawn})
    parts = [(a, b - a, off) for (a, b), (_, off) in zip(pairwise(ends), drawn, strict=False)][::2]
    for at, size, off in parts:
        expected[at : at + size] = MEMORY[off : off + size]
    tos, sizes = column([at for at, _, _ in parts]), column([size for _, size, _ in parts])
    sources = column([MEMORY.ctypes.data + off for _, _, off in parts])
    columns = (tos.ctypes.data, sources.ctypes.data, sizes.ctypes.data)
    assert native.gather(target.ctypes.data, length, *columns, len(parts)) == xxhash.xxh3_128_digest(expected.data)
    assert np.array_equal(target, expected)
    assert set(memory[: GUARD + start]) | set(memory[GUARD + start + length :]) == {0xA5}


def test_native_copies_can_be_disabled() -> None:
    code = "import everstep.native; print(everstep.native.copy_hash)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={ENV_VARIABLE: "0"}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize(("compiler", "reason"), [("/nowhere/cc", "no C compiler"), ("false", "false ended with 1")])
def test_build_without_compiler_omits_native_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert reason in hatch_build.compiled(tmp_path / "a.c", tmp_path / "a.so")
