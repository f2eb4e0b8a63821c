"""Slot memory is registered with CUDA and released, with a CUDA runtime that only records its calls."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from everstep.layout.segment_header import PAGE_BYTES, segment_bytes
from everstep.layout.slots import format_segment
from everstep_trainer.slots.vault_client import MappedSegment
from everstep_trainer.snapshot.planner import page_lock

pytestmark = pytest.mark.slow


class Runtime:
    """A runtime with cudaHostRegister and cudaHostUnregister. ``code``: the result of the next registration."""

    def __init__(self) -> None:
        self.code = 0
        self.registered: dict[int, int] = {}
        self.refused: list[int] = []

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        assert flags == 1
        if self.code == 0:
            assert address not in self.registered, "cudaErrorHostMemoryAlreadyRegistered"
            self.registered[address] = length
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        if self.registered.pop(address, None) is None:
            self.refused.append(address)
            return 713
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def segment_at(path: Path) -> MappedSegment:
    path.write_bytes(bytes(segment_bytes(2, PAGE_BYTES)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping, memoryview(mapping) as whole:
        format_segment(whole, 2, PAGE_BYTES)
    return MappedSegment(str(path))


def test_segment_is_registered_once_and_unregistered_when_freed(runtime: Runtime, tmp_path: Path) -> None:
    segment = segment_at(tmp_path / "own-0")
    page_lock(segment)
    page_lock(segment)
    assert list(runtime.registered.values()) == [segment_bytes(2, PAGE_BYTES)]
    payload = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    del segment
    gc.collect()
    assert runtime.registered == {}, "a view of the mapping does not keep it registered"
    assert payload.numel() == segment_bytes(2, PAGE_BYTES)
    assert runtime.refused == []


def test_lock_failure_is_raised_and_nothing_is_unregistered(runtime: Runtime, tmp_path: Path) -> None:
    runtime.code = 2
    segment = segment_at(tmp_path / "own-0")
    with pytest.raises(RuntimeError, match=r"cannot page-lock \d+ bytes .* CUDA error 2; raise the limit .*ulimit -l"):
        page_lock(segment)
    assert not segment.is_page_locked
    del segment
    gc.collect()
    assert runtime.refused == []
