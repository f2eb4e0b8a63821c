"""State outside of parameters and buffers is named when it is tracked, and not lost with the first rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everstep.errors import ConfigurationError
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.ranks.replicas import on_four_ranks
from tests.unit.trainer_hooks.state import untracked_replicas
from tests.unit.trainer_hooks.state.untracked_replicas import KINDS


def track(**objects: Any) -> None:
    Run(RankContext(), TrainingSession()).track(**objects)


@pytest.mark.promise("partial-state-refused")
def test_optimizer_with_untracked_parameters_is_refused() -> None:
    """Its state would be stored, and the values of the parameter lost."""
    model, loss = nn.Linear(2, 2), nn.Linear(2, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    with pytest.raises(
        ValueError, match=r"optimizer trains 2 parameters .*\(of shape \[3, 2\], \[3\]\).*Track the module"
    ):
        track(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer trains 2 parameters"):
        track(model=[model], optimizer=[optimizer])
    track(model=model, loss=loss, optimizer=optimizer)
    track(model=model, more=nn.ParameterList(loss.parameters()), optimizer=optimizer)


class Overriding(nn.Linear):
    """A module whose state_dict has an extra entry."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(*args, **kwargs), "count": 3}


class Saving(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.ones(1)


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)

    def add_count(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}count"] = torch.ones(1)

    model.register_state_dict_post_hook(add_count)
    return model


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Overriding(2, 2), "count"),
        (Saving(2, 2), "count"),
        (hooked(), "count"),
        (nn.Sequential(Saving(2, 2)), "0.count"),
        (nn.Sequential(hooked()), "0.count"),
    ],
)
def test_extra_state_dict_entries_are_warned_of(model: nn.Module, name: str, caplog: pytest.LogCaptureFixture) -> None:
    track(model=model)
    assert f"model has {name} in its state_dict(), which are none of its parameters" in caplog.text
    assert "get_extra_state" in caplog.text


class Renaming(nn.Linear):
    """A module with other names on storage, parts of a tensor, and extra state."""

    def __init__(self) -> None:
        super().__init__(2, 4)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        state |= {f"{prefix}query": weight[:2], f"{prefix}key": weight[2:]}

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def fused() -> nn.Module:
    """A projection whose parts are copied into the state dict, since they are interleaved in the whole."""
    model = nn.Linear(2, 4)
    model.register_buffer("cache", torch.zeros(3), persistent=False)

    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        state |= {f"{prefix}query": weight[::2].clone(), f"{prefix}key": weight[1::2].clone()}

    model.register_state_dict_post_hook(split)
    return model


class Raising(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("not now")


@pytest.mark.parametrize("model", [Renaming(), nn.Sequential(Renaming()), fused(), Raising(2, 2), nn.BatchNorm1d(2)])
def test_renamed_state_dict_entries_cause_no_warning(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    track(model=model)
    assert "state_dict" not in caplog.text


class Averaged:
    """Averaged weights in a list, as common helpers hold them."""

    def __init__(self, count: int) -> None:
        self.shadow = [torch.zeros(1 << 20) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.99, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Unreadable(Averaged):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("only between steps")


@pytest.mark.promise("partial-state-refused")
def test_large_tensors_in_an_object_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"mean holds 12582912 bytes.*mean\['shadow'\].*AveragedModel"):
        track(model=nn.Linear(2, 2), mean=Averaged(3))
    track(model=nn.Linear(2, 2), mean=Averaged(1))
    track(model=nn.Linear(2, 2), mean=Unreadable(3))


@pytest.mark.parametrize(
    ("tracked", "advice"),
    [
        ({"loss": 1.0}, "hold its values in an object whose state_dict"),
        ([1.0, nn.Linear(1, 1)], "hold its values in an object whose state_dict"),
        ({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "track each of its members under a name of its own"),
    ],
)
def test_container_is_refused_with_fitting_advice(tracked: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        track(model=nn.Linear(2, 2), best=tracked)


@pytest.fixture(scope="module")
def ranks(session_forks: Any) -> list[dict[str, Any]]:
    return on_four_ranks(session_forks, untracked_replicas.rank_results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["teacher", "mask", "untracked", "late"])
def test_untracked_replica_state_is_equal_on_all_replicas(ranks: list[dict[str, Any]], kind: str, part: str) -> None:
    """This holds in a generation that restores nothing too, where all ranks get rank 0's state."""
    of_rank = [rank[kind][part] for rank in ranks]
    groups = [of_rank[0::2], of_rank[1::2]] if kind == "over two ranks" else [of_rank]
    for alike in groups:
        assert all(values == alike[0] for values in alike)
