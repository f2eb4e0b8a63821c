"""Optimizer state in an ordinary checkpoint that is not one tensor for each parameter: shared, and nested in lists."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from everstep.ids import Version
from everstep_agent.spill.__main__ import execute
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.sharing_optimizer import SharingOptimizer
from tests.support.vaults.sealed_slots import fill_slots, load_checkpoint_alone

VERSION = Version(2, 5)
FORMS = ("spill", "file")


def job(kind: Any = SharingOptimizer, **options: Any) -> dict[str, Any]:
    model = nn.Linear(3, 3)
    return {"model": model, "optimizer": kind(model.parameters(), **options)}


def stored(tracked: dict[str, Any], folder: Path, form: str) -> Path:
    if form == "spill":
        order = fill_slots(folder / "slots", TrackedState(tracked), VERSION, world=2)
        assert execute(msgspec.structs.replace(order, url=str(folder / "out"))).complete
        return folder / "out"
    state = {key: value.state_dict() for key, value in tracked.items()}
    if form == "folder":
        state_dict_saver.save(state, checkpoint_id=folder / "theirs", no_dist=True)
        return folder / "theirs"
    torch.save(state, folder / "file.pt")
    return folder / "file.pt"


@pytest.mark.promise("tracked-state-exact")
@pytest.mark.parametrize("form", FORMS)
def test_shared_optimizer_state_stays_shared(tmp_path: Path, form: str) -> None:
    before, after = job(), job()
    before["optimizer"].step()
    load_checkpoint_alone(stored(before, tmp_path, form), after, TrackedState(after))
    first, second = after["optimizer"].state.values()
    assert first["step"] is second["step"]
    assert first["anchor"].data_ptr() == after["model"].weight.data_ptr()
    assert first["average"] is not second["average"]
    for _ in range(3):
        before["optimizer"].step()
        after["optimizer"].step()
    pairs = zip(before["model"].parameters(), after["model"].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def train(tracked: dict[str, Any], numbers: Iterable[int]) -> list[float]:
    losses = []
    for number in numbers:
        x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(number))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            tracked["optimizer"].zero_grad()
            loss: torch.Tensor = (tracked["model"](x) - y).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(float(tracked["optimizer"].step(closure)))
    return losses


@pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's, of a single process
@pytest.mark.parametrize("form", [*FORMS, "folder"])
def test_optimizer_state_nested_in_lists_is_restored(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {"lr": 0.5, "history_size": 3, "max_iter": 2}
    before, after = job(torch.optim.LBFGS, **options), job(torch.optim.LBFGS, **options)
    train(before, range(4))
    load_checkpoint_alone(stored(before, tmp_path, form), after, TrackedState(after))
    assert train(before, range(4, 7)) == train(after, range(4, 7))


class Held:
    """Keeps the tensor that it is given."""

    value = torch.arange(5000.0)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_overwriting_the_file_after_start_changes_nothing(tmp_path: Path) -> None:
    held, loaded = Held(), Held()
    before, after = {"model": nn.Linear(3, 3), "held": held}, {"model": nn.Linear(3, 3), "held": loaded}
    path = stored(before, tmp_path, "file")
    load_checkpoint_alone(path, after, TrackedState(after))
    with path.open("r+b") as file:
        file.write(bytes(os.path.getsize(path)))
    assert torch.equal(loaded.value, held.value)
