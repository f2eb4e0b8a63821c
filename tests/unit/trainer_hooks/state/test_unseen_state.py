"""State that is not where it is looked for: told by name when it is tracked, instead of lost with the first rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from torch import nn

from everstep.errors import ConfigurationError


def track(**objects: object) -> None:
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
    """Says more than it holds, by a method of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "count": 3}


class Saving(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}count"] = torch.ones(1)


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda module, said, prefix, _: said.update({f"{prefix}count": torch.ones(1)}))
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
    """Has other names on storage, parts for the whole, and extra state."""

    def __init__(self) -> None:
        super().__init__(2, 4)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, said: dict[str, Any], prefix: str, _: Any) -> None:
        weight = said.pop(f"{prefix}weight")
        said |= {f"{prefix}query": weight[:2], f"{prefix}key": weight[2:]}

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def fused() -> nn.Module:
    """A projection whose parts are copied into the state dict, since they are interleaved in the whole."""
    model = nn.Linear(2, 4)
    model.register_buffer("cache", torch.zeros(3), persistent=False)

    def split(module: nn.Module, said: dict[str, Any], prefix: str, _: Any) -> None:
        weight = said.pop(f"{prefix}weight")
        said |= {f"{prefix}query": weight[::2].clone(), f"{prefix}key": weight[1::2].clone()}

    model.register_state_dict_post_hook(split)
    return model


class Raising(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
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


class Lambda(Averaged):
    def state_dict(self) -> dict[str, Any]:
        return {"decay": lambda step: 0.9}


@pytest.mark.promise("partial-state-refused")
def test_large_tensors_in_an_object_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"mean holds 12582912 bytes.*mean\['shadow'\].*AveragedModel"):
        track(model=nn.Linear(2, 2), mean=Averaged(3))
    track(model=nn.Linear(2, 2), mean=Averaged(1))
    track(model=nn.Linear(2, 2), mean=Unreadable(3))


def test_unstorable_value_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"mean\['decay'\] is a builtins.function"):
        track(model=nn.Linear(2, 2), mean=Lambda(0))


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
