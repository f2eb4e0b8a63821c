"""One pass over a slot copies its bytes, and fails at a chunk that differs from the sealed one."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import DigestMismatch
from everstep.layout.slots import CHUNK_BYTES, chunk_digests
from everstep.native import CopyHash, copy_hash
from everstep_trainer.slots.byte_moves import NO_COPIES, TensorCopies, is_byte_copyable
from everstep_trainer.slots.local_slots import BLOCK_BYTES, HashingCopy, chunks_of, chunks_of_copies
from tests.support.plugins.example_counts import examples

SIZE = 3 * CHUNK_BYTES + 12_345
PAYLOAD = bytes(random.Random(7).randbytes(1 << 16)) * (SIZE // (1 << 16)) + bytes(SIZE % (1 << 16))
DIGESTS = list(chunk_digests(memoryview(PAYLOAD)))
EVERY = range(len(DIGESTS))
NEAR = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, SIZE - 1]
starts = st.one_of(st.sampled_from(NEAR), st.integers(0, SIZE - 1))
lengths = st.one_of(st.integers(1, 300), st.sampled_from([BLOCK_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]))
ranges = st.tuples(starts, lengths).map(lambda pair: (pair[0], min(pair[1], SIZE - pair[0])))


def filled_by(
    plan: list[list[tuple[int, int]]], threads: int, checked: range = EVERY, native: CopyHash | None = copy_hash
) -> list[bytes]:
    moves = TensorCopies()
    targets = [torch.zeros(sum(length for _, length in each), dtype=torch.uint8) for each in plan]
    for target, each in zip(targets, plan, strict=True):
        moves.add(target, each)
    HashingCopy(memoryview(PAYLOAD), moves.table(), DIGESTS, checked, native).run(threads)
    return [target.numpy().tobytes() for target in targets]


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(st.lists(st.lists(ranges, min_size=1, max_size=3), max_size=4), st.integers(1, 3))
def test_every_tensor_gets_its_ranges_in_order(plan: list[list[tuple[int, int]]], threads: int) -> None:
    expected = [b"".join(PAYLOAD[at : at + n] for at, n in each) for each in plan]
    for native in (copy_hash, None):
        assert filled_by(plan, threads, native=native) == expected


def test_adjacent_ranges_merge_into_one_copy() -> None:
    flat = torch.zeros(100, dtype=torch.uint8)
    moves = TensorCopies()
    for part, at in ((flat[50:100], 60), (flat[0:50], 10)):
        moves.add(part, [(at, 50)])
    rows = moves.table()
    assert (rows.source.tolist(), rows.length.tolist()) == ([10], [100])
    assert rows.nbytes == 100


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + BLOCK_BYTES, SIZE - 1])
def test_flipped_bit_fails_the_sweep_and_stops_all_threads(at: int, threads: int) -> None:
    rotten = bytearray(PAYLOAD)
    rotten[at] ^= 16
    target = torch.zeros(SIZE, dtype=torch.uint8)
    moves = TensorCopies()
    moves.add(target, [(0, SIZE)])
    with pytest.raises(DigestMismatch, match=f"chunk {at // CHUNK_BYTES} "):
        HashingCopy(memoryview(rotten), moves.table(), DIGESTS, EVERY).run(threads)
    assert all(thread.name != "everstep-restore" for thread in threading.enumerate())


def test_only_the_selected_chunks_are_hashed() -> None:
    rotten = bytearray(PAYLOAD)
    rotten[CHUNK_BYTES] ^= 1
    HashingCopy(memoryview(rotten), NO_COPIES, DIGESTS, {0, 2, 3}).run(2)
    with pytest.raises(DigestMismatch, match="chunk 1 "):
        HashingCopy(memoryview(rotten), NO_COPIES, DIGESTS, {1}).run(2)


def test_chunks_of_ranges_and_copies_are_those_touched() -> None:
    assert chunks_of([(0, 0), (CHUNK_BYTES - 1, 2), (3 * CHUNK_BYTES, 5)]) == {0, 1, 3}
    moves = TensorCopies()
    moves.add(torch.zeros(CHUNK_BYTES + 2, dtype=torch.uint8), [(CHUNK_BYTES - 1, CHUNK_BYTES + 2)])
    assert chunks_of_copies(moves.table()) == {0, 1, 2}


@pytest.mark.parametrize("place", [(-1, 10), (SIZE - 9, 10), (1 << 60, 10)])
def test_manifest_pointing_outside_its_slot_reads_nothing(place: tuple[int, int]) -> None:
    moves = TensorCopies()
    moves.add(torch.zeros(10, dtype=torch.uint8), [place])
    with pytest.raises(IndexError):
        HashingCopy(memoryview(PAYLOAD), moves.table(), DIGESTS, EVERY)
    with pytest.raises(IndexError):
        HashingCopy(memoryview(PAYLOAD), NO_COPIES, DIGESTS, [len(DIGESTS)])


def test_partially_filled_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="9 bytes do not fill a tensor of 10"):
        TensorCopies().add(torch.zeros(10, dtype=torch.uint8), [(0, 4), (20, 5)])


def test_only_contiguous_same_dtype_tensors_are_plain() -> None:
    square = torch.zeros(4, 4)
    assert is_byte_copyable(square, torch.float32)
    assert is_byte_copyable(square[1:3], torch.float32)
    assert not is_byte_copyable(square[:, 1:3], torch.float32)
    assert not is_byte_copyable(square.t(), torch.float32)
    assert not is_byte_copyable(square.to_sparse(), torch.float32)
    assert not is_byte_copyable(square.as_subclass(type("Packed", (torch.Tensor,), {})), torch.float32)
    assert not is_byte_copyable(square, torch.bfloat16)
    assert not is_byte_copyable(torch.zeros(4, dtype=torch.complex64).conj(), torch.complex64)
