"""Ranks that start from storage agree on a checkpoint while others write, remove or damage checkpoints there."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore, Store

from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.layout.stored_checkpoints import folder_name
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.spill.__main__ import execute
from everstep_trainer.importers import checkpoint_files
from everstep_trainer.importers.importer import CheckpointImport, read_checkpoint
from everstep_trainer.importers.source_agreement import SourceAgreement
from everstep_trainer.importers.storage_reads import MAX_TRIES, RETRY_BACKOFF, DamagedCheckpoint
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.vaults.sealed_slots import fill_slots

WORLD = 2
Reading = Callable[[int, str], None]


class Rank:
    """A layer whose weights all have one value, and its optimizer with or without momentum."""

    def __init__(self, value: float = 0.0, *, stepped: bool = False) -> None:
        self.model = nn.Linear(6, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if stepped:
            self.model(torch.ones(1, 6)).sum().backward()
            self.optimizer.step()
        nn.init.constant_(self.model.weight, value)
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.state = TrackedState(self.tracked)
        self.unusable: list[str] = []
        self.waited: list[float] = []

    def load(self, store: Store, rank: int, places: Sequence[str], reading: Reading) -> int:
        def read(url: str) -> CheckpointImport:
            reading(rank, url)
            return read_checkpoint(url, self.tracked, self.state, rank, WORLD)

        choice = SourceAgreement(
            store, rank, WORLD, SYSTEM_CLOCK, lambda url, _: self.unusable.append(url), self.waited.append
        )
        return choice.load(places, read)

    @property
    def value(self) -> float:
        (value,) = set(self.model.weight.flatten().tolist())
        return float(value)


def _store(root: Path, step: int, *, stepped: bool = True) -> Path:
    """Store a checkpoint whose step is the value of all weights. Each of two ranks wrote half of it."""
    rank = Rank(float(step), stepped=stepped)
    order = fill_slots(root / f"slots-{step}", rank.state, Version(1, step), world=2, layout="sharded")
    execute(msgspec.structs.replace(order, url=str(root / "out")))
    folder = root / "out" / folder_name(Version(1, step))
    os.utime(folder / ".metadata", (step, step))
    return folder


def _flip(folder: Path, step: int) -> None:
    """Flip a bit in the half of the weights that rank 1 wrote."""
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((4,), float(step)).numpy().tobytes())] ^= 1
    file.write_bytes(data)


def _load(
    *places: object, ranks: Sequence[Rank] = (), others: Sequence[str] | None = None, reading: Reading = lambda *_: None
) -> tuple[list[Rank], list[int | Exception]]:
    """Load on all ranks at once, through one store. ``others``: the places given to rank 1, if they differ."""
    ranks = list(ranks) or [Rank() for _ in range(WORLD)]
    store, names = HashStore(), [str(place) for place in places]

    def load_one(rank: int) -> int | Exception:
        try:
            return ranks[rank].load(store, rank, names if rank == 0 or others is None else others, reading)
        except NotRestorable as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(ranks), list(pool.map(load_one, range(WORLD), timeout=120))


@pytest.mark.promise("storage-choice")
def test_checkpoint_appearing_during_choice_is_all_or_none(tmp_path: Path) -> None:
    _store(tmp_path, 5)

    def reading(rank: int, _: str) -> None:
        if rank == 0:  # it has chosen
            _store(tmp_path, 9)

    ranks, steps = _load(tmp_path / "out", reading=reading)
    assert steps == [5, 5]
    assert [rank.value for rank in ranks] == [5, 5]


@pytest.mark.promise("storage-choice")
def test_removed_checkpoint_is_used_by_no_rank(tmp_path: Path) -> None:
    _store(tmp_path, 5)
    newest = _store(tmp_path, 9)

    def reading(rank: int, url: str) -> None:
        if rank == 1 and url == str(newest):
            shutil.rmtree(newest)

    ranks, steps = _load(tmp_path / "out", reading=reading)
    assert steps == [5, 5]
    assert [rank.value for rank in ranks] == [5, 5]


@pytest.mark.promise("storage-choice")
@pytest.mark.parametrize("named", [True, False], ids=["by-the-controller", "in-a-folder"])
def test_damaged_checkpoint_makes_all_ranks_use_the_previous(tmp_path: Path, named: bool) -> None:
    folders = [_store(tmp_path, step) for step in (3, 5, 9)]
    for folder, step in zip(folders[1:], (5, 9), strict=True):
        _flip(folder, step)
    ranks, steps = _load(*(folders[::-1] if named else [tmp_path / "out"]))
    assert steps == [3, 3]
    assert [rank.value for rank in ranks] == [3, 3]
    assert [rank.unusable for rank in ranks] == [[str(folders[2]), str(folders[1])]] * 2


@pytest.mark.promise("storage-choice")
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), TimeoutError()], ids=["error", "timeout"])
def test_brief_storage_failure_costs_no_checkpoint(tmp_path: Path, error: OSError) -> None:
    _store(tmp_path, 5)
    _store(tmp_path, 9)
    tries = itertools.count(1)

    def reading(rank: int, _: str) -> None:
        if rank == 1 and next(tries) < MAX_TRIES:
            raise error

    ranks, steps = _load(tmp_path / "out", reading=reading)
    assert steps == [9, 9]
    assert [rank.unusable for rank in ranks] == [[], []]
    assert ranks[0].waited == []
    assert len(ranks[1].waited) == MAX_TRIES - 1
    assert all(0 < waited <= RETRY_BACKOFF.limit_s(n) for n, waited in enumerate(ranks[1].waited))


def test_storage_failure_during_listing_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _store(tmp_path, 5)
    answers: list[OSError] = [ConnectionResetError(104, "Connection reset by peer")]
    there = checkpoint_files.find_checkpoints

    def look(url: str) -> list[str]:
        if answers:
            raise answers.pop()
        return there(url)

    monkeypatch.setattr(checkpoint_files, "find_checkpoints", look)
    assert _load(tmp_path / "out")[1] == [5, 5]


@pytest.mark.parametrize("mended", [True, False])
def test_damaged_checkpoint_is_reread_exactly_once(tmp_path: Path, mended: bool) -> None:
    _store(tmp_path, 5)
    newest = _store(tmp_path, 9)
    asked: list[str] = []

    def reading(rank: int, url: str) -> None:
        if rank == 1 and url == str(newest):
            asked.append(url)
            if len(asked) == 1 or not mended:
                raise DamagedCheckpoint("a bit flipped on its way")

    ranks, steps = _load(tmp_path / "out", reading=reading)
    assert steps == ([9, 9] if mended else [5, 5])
    assert ranks[1].unusable == ([] if mended else [str(newest)])
    assert len(asked) == 2
    assert ranks[1].waited == []


@pytest.mark.promise("storage-choice")
def test_checkpoint_unreadable_for_one_rank_is_used_by_none(tmp_path: Path) -> None:
    _store(tmp_path, 5)
    newest = _store(tmp_path, 9)

    def reading(rank: int, url: str) -> None:
        if rank == 1 and url == str(newest):
            raise OSError(5, "Input/output error")

    ranks, steps = _load(tmp_path / "out", reading=reading)
    assert steps == [5, 5]
    assert [rank.value for rank in ranks] == [5, 5]
    assert [rank.unusable for rank in ranks] == [[], [str(newest)]]


@pytest.mark.promise("storage-choice")
def test_damaged_checkpoint_leaves_no_state_behind(tmp_path: Path) -> None:
    _store(tmp_path, 5, stepped=False)
    _flip(_store(tmp_path, 9), 9)
    ranks, steps = _load(tmp_path / "out")
    assert steps == [5, 5]
    assert [dict(rank.optimizer.state) for rank in ranks] == [{}, {}]


def test_all_ranks_fail_with_the_reason_if_none_is_usable(tmp_path: Path) -> None:
    folder = _store(tmp_path, 9)
    _flip(folder, 9)
    _, errors = _load(folder)
    for error in errors:
        assert isinstance(error, NotRestorable)
        assert str(error).startswith(f"no checkpoint on storage can be used: {folder}: rank 0: {folder}/__1_0.distcp")


def test_object_mismatch_is_refused_without_trying_older(tmp_path: Path) -> None:
    _store(tmp_path, 5)
    _store(tmp_path, 9)
    other = Rank()
    other.model.weight = nn.Parameter(torch.zeros(3, 3))
    _, errors = _load(tmp_path / "out", ranks=[Rank(), other])
    assert all("model.weight is [3, 3] now, but [4, 6] in" in str(error) for error in errors)


def test_start_option_of_rank_0_decides(tmp_path: Path) -> None:
    folder = _store(tmp_path, 5)
    assert _load(folder, others=[])[1] == [5, 5]
    assert _load(others=[str(folder)])[1] == [0, 0]
