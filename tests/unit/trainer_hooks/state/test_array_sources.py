"""Arrays that are replaced in each step: snapshots without waits, and restores into fresh memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import Box
from everstep.wire.v1.training import RestoreRule
from everstep_agent.spill.__main__ import execute
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.session.loss_guard import LossGuard
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.arrays import ArrayPart
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.sealed_slots import fill_slots, load_checkpoint_alone
from tests.support.vaults.vault_process import vaults

ROWS = 8


class Grid:
    """Rows of numbers, in pieces of ``piece`` rows, and the step."""

    def __init__(self, piece: int = ROWS, value: float = 0.0) -> None:
        self._piece = piece
        self.replace(0, value)

    def replace(self, step: int, value: float) -> None:
        self.step, self.rows = step, torch.full((ROWS, 4), value)
        self._parts = self._cut(self.rows)

    def array_parts(self) -> Sequence[ArrayPart]:
        return self._parts

    def make_restore_parts(self, names: Collection[str]) -> Sequence[ArrayPart]:
        self._filled = torch.full((ROWS, 4), -1.0)
        return [part for part in self._cut(self._filled) if part.name in names]

    def adopt_restored(self) -> None:
        self.rows = self._filled
        self._parts = self._cut(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.step = stored["step"]

    def _cut(self, rows: torch.Tensor) -> tuple[ArrayPart, ...]:
        return tuple(
            ArrayPart("rows", (ROWS, 4), Box((at, 0), (self._piece, 4)), rows[at : at + self._piece])
            for at in range(0, ROWS, self._piece)
        )


@pytest.fixture
def client(program_forks: ForkPool) -> Iterator[VaultClient]:
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(Path(vault.run_dir) / "vault.sock"))
        try:
            yield client
        finally:
            client.close()


def store(client: VaultClient, grid: Grid, steps: int) -> None:
    """Snapshot steps that never wait for the copy of the one before."""
    spec = generation(1)
    snapshots = Snapshotter(client, TrackedState({"grid": grid}), spec, spec.roster[0], HashStore(), lambda _: None)
    for step in range(1, steps + 1):
        grid.replace(step, float(step))
        snapshots.begin(step)
    snapshots.close(finish=True)


def restore(client: VaultClient, grid: Grid) -> Version | None:
    spec = generation(2, restore=RestoreRule())
    restoration = Restoration(client, spec, spec.roster[0], HashStore())
    return restoration.fill(TrackedState({"grid": grid})).version


@pytest.mark.parametrize("piece", [1, 2, ROWS])
def test_arrays_restore_in_pieces_of_any_size(client: VaultClient, piece: int) -> None:
    store(client, Grid(4), 5)
    grid = Grid(piece)
    before = grid.rows
    assert restore(client, grid) == Version(1, 5)
    assert (grid.step, grid.rows.unique().tolist()) == (5, [5.0])
    assert before.unique().tolist() == [0.0], "the memory of the arrays before is not written to"


def test_refused_restore_leaves_arrays_as_they_are(client: VaultClient) -> None:
    store(client, Grid(), 2)

    class Fussy(Grid):
        def array_parts(self) -> Sequence[ArrayPart]:
            return [ArrayPart("other", (ROWS, 4), Box((0, 0), (ROWS, 4)), self.rows)]

    grid = Fussy(value=7.0)
    with pytest.raises(NotRestorable, match=r"1 tensors are new \(grid.other\)"):
        restore(client, grid)
    assert grid.rows.unique().tolist() == [7.0]


def test_replaced_array_is_a_change_of_the_state() -> None:
    grid = Grid()
    state = TrackedState({"grid": grid})
    assert [tensor.name for tensor in state.tensors()] == ["grid.rows"]
    assert state.is_unchanged()
    assert not state.changes_in_place
    grid.replace(1, 1.0)
    assert not state.is_unchanged()


def test_guard_refuses_arrays() -> None:
    run = Run(RankContext(), TrainingSession())
    guard: LossGuard = run.guard()
    with pytest.raises(ValueError, match="grid holds arrays"):
        guard.require_compatible({"grid": Grid()})


def test_arrays_start_from_checkpoint_on_storage(tmp_path: Path) -> None:
    stored, url = Grid(), str(tmp_path / "stored")
    stored.replace(9, 3.0)
    order = fill_slots(tmp_path / "slots", TrackedState({"grid": stored}), Version(1, 40), world=2)
    execute(msgspec.structs.replace(order, url=url))
    grid = Grid(2)
    assert load_checkpoint_alone(url, {"grid": grid}, TrackedState({"grid": grid})) == 40
    assert (grid.step, grid.rows.unique().tolist()) == (9, [3.0])


def test_arrays_start_from_ordinary_checkpoint(tmp_path: Path) -> None:
    path, grid = tmp_path / "model.pt", Grid(4)
    torch.save({"grid": {"rows": torch.full((ROWS, 4), 5.0)}}, path)
    assert load_checkpoint_alone(path, {"grid": grid}, TrackedState({"grid": grid})) == 0
    assert (grid.step, grid.rows.unique().tolist()) == (0, [5.0])
