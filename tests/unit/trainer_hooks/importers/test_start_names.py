"""Which tensor of an ordinary checkpoint is which of a module's: by one rule for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn

from everstep.errors import NotRestorable
from tests.support.spilling import start_alone


class Outer(nn.Module):
    """With a part whose tensors are called as its own, below the key under which models are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(2)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.model.norm.weight)


class Headed(nn.Module):
    """As transformers' models say what is below their heads."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2)


def started(model: nn.Module, path: Path) -> nn.Module:
    tracked: dict[str, Any] = {"model": model}
    start_alone(path, tracked, TrackedState(tracked))
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.promise("import-checkpoints")
@pytest.mark.parametrize("form", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s}])
def test_submodule_named_like_a_wrapper_is_not_the_whole_model(tmp_path: Path, form: Any) -> None:
    before = Outer()
    torch.save(form(before.state_dict()), tmp_path / "file.pt")
    assert equal(started(Outer(), tmp_path / "file.pt"), before)


def test_submodule_starts_from_a_whole_model(tmp_path: Path) -> None:
    before = Outer()
    torch.save(before.state_dict(), tmp_path / "file.pt")
    part = started(nn.ModuleDict({"norm": nn.LayerNorm(2)}), tmp_path / "file.pt")
    assert torch.equal(part["norm"].weight, before.norm.weight)  # type: ignore[index]


def test_headed_and_base_models_start_from_each_other(tmp_path: Path) -> None:
    before, base = Headed(), Headed()
    torch.save(before.state_dict(), tmp_path / "headed.pt")
    torch.save(before.base.state_dict(), tmp_path / "base.pt")
    assert equal(started(base, tmp_path / "base.pt"), before)
    base.base.base_model_prefix = "base"  # type: ignore[assignment]
    nn.init.zeros_(base.base.weight)
    assert equal(started(base.base, tmp_path / "headed.pt"), before.base)


def test_state_split_over_two_keys_is_refused(tmp_path: Path) -> None:
    state = Outer().state_dict()
    halves = {"model": {"norm.weight": state["norm.weight"], "norm.bias": state["norm.bias"]}, **state}
    torch.save({k: v for k, v in halves.items() if not k.startswith("norm")}, tmp_path / "file.pt")
    with pytest.raises(NotRestorable, match=r"lacks 2 of 4 tensors of tracked modules \(model\.norm\.weight"):
        started(Outer(), tmp_path / "file.pt")
