"""Restore data from other nodes, with a stub of a vault that writes requested ranges when the test releases it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import DigestMismatch, EverstepError, Unavailable
from everstep.ids import Version
from everstep.wire.v1.local import Fetch, Fetched, SlotInfo
from everstep_trainer.slots import byte_moves as cutting
from everstep_trainer.slots import remote_slots as module
from everstep_trainer.slots.byte_moves import FetchBatch, TensorCopies, split_into_batches
from everstep_trainer.slots.remote_slots import ScratchFetch
from tests.support.plugins.example_counts import examples

BATCH = 1 << 12


def slot(rank: int = 0) -> SlotInfo:
    return SlotInfo(node="n2", rank=rank, version=Version(1, 1), path="", slot=0, replica=False, manifest_digest="")


def payload_of(rank: int, size: int = 40 * BATCH) -> bytes:
    return b"".join((rank << 24 | number).to_bytes(4, "little") for number in range(size // 4))


class Peer:
    """A stub of a vault that answers at once, or as ``answer`` decides."""

    def __init__(self, answer: Callable[[dict[str, Any]], EverstepError | None] = lambda _: None) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def fetch(self, wanted: Fetch) -> Future[Fetched]:
        ask = msgspec.structs.asdict(wanted)
        self.asked.append(ask)
        answer: Future[Fetched] = Future()
        error = self.answer(ask)
        if error is not None:
            answer.set_exception(error)
            return answer
        data = b"".join(payload_of(ask["rank"])[at : at + n] for at, n in ask["ranges"])
        path = Path(ask["target_path"])
        path.touch()
        with path.open("r+b") as file:
            file.seek(ask["target_offset"])
            file.write(data)
        answer.set_result(Fetched(request=0, bytes=len(data)))
        return answer


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", BATCH)
    monkeypatch.setattr(cutting, "BATCH_BYTES", BATCH)
    monkeypatch.setattr(module, "WINDOW_BYTES", module.WINDOW_BATCHES * BATCH)


def landing(peer: Any, path: Path, batches: list[FetchBatch]) -> ScratchFetch:
    return ScratchFetch(peer, "job", lambda: path, batches)


def planned(pieces: list[tuple[int, int]], rank: int = 0) -> tuple[list[torch.Tensor], list[FetchBatch]]:
    moves, targets = TensorCopies(), []
    for at, length in pieces:
        targets.append(torch.zeros(length, dtype=torch.uint8))
        moves.add(targets[-1], [(at, length)])
    return targets, list(split_into_batches(slot(rank), moves.table()))


def expected(pieces: list[tuple[int, int]], rank: int = 0) -> list[bytes]:
    return [payload_of(rank)[at : at + length] for at, length in pieces]


def bytes_of(targets: list[torch.Tensor]) -> list[bytes]:
    return [target.numpy().tobytes() for target in targets]


spots = st.tuples(st.integers(0, 39 * BATCH), st.integers(1, BATCH))


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(st.lists(spots, min_size=1, max_size=12))
def test_fetched_ranges_land_in_their_tensors(pieces: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(module, "BATCH_BYTES", BATCH)
        patch.setattr(cutting, "BATCH_BYTES", BATCH)
        patch.setattr(module, "WINDOW_BYTES", module.WINDOW_BATCHES * BATCH)
        targets, batches = planned(pieces)
        assert all(batch.nbytes <= BATCH for batch in batches)
        assert landing(Peer(), Path(folder, "scratch"), batches).finish() == []
        assert bytes_of(targets) == expected(pieces)


@pytest.mark.parametrize("error", [DigestMismatch("rotten"), Unavailable("silent")])
def test_failed_slot_is_named_once_and_others_arrive(tmp_path: Path, error: EverstepError) -> None:
    pieces = [(0, 12 * BATCH)]
    _, bad = planned(pieces, rank=1)
    targets, good = planned(pieces, rank=2)
    peer, path = Peer(lambda ask: error if ask["rank"] == 1 and ask["ranges"][0][0] >= BATCH else None), tmp_path / "s"
    under_way = landing(peer, path, bad + good)
    (failure,) = under_way.finish()
    assert (failure.slot.rank, failure.is_corrupt) == (1, isinstance(error, DigestMismatch))
    assert bytes_of(targets) == expected(pieces, rank=2)
    assert sum(ask["rank"] == 1 for ask in peer.asked) <= module.WINDOW_BATCHES + 1


def test_late_vault_write_lands_in_no_reused_file(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    silent = landing(Peer(lambda _: Unavailable("silent")), path, planned([(0, 10)])[1])
    path.touch()
    silent.finish()
    silent.close()
    assert not path.exists()


def test_place_of_a_failed_fetch_is_not_reused(tmp_path: Path) -> None:
    _, bad = planned([(0, 2 * BATCH)], rank=1)
    _, good = planned([(0, 30 * BATCH)], rank=2)
    peer = Peer(lambda ask: Unavailable("silent") if ask["rank"] == 1 else None)
    under_way = landing(peer, tmp_path / "scratch", bad + good)
    under_way.start()
    at_first = len(peer.asked)
    under_way.finish()
    lost = {ask["target_offset"] // BATCH for ask in peer.asked if ask["rank"] == 1}
    later = {ask["target_offset"] // BATCH for ask in peer.asked[at_first:] if ask["rank"] == 2}
    assert not lost & later
