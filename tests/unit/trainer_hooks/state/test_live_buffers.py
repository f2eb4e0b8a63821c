"""Buffers that forward passes change are looked at in every step: little is done for each."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.snapshot.copy import SnapshotSources
from everstep_trainer.state import tensors
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn


def normalized() -> tuple[nn.Module, TrackedState, SnapshotSources]:
    """A model whose running statistics were seen to change, and what is copied of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    state = TrackedState({"model": model})
    model(torch.randn(8, 4))
    sources = SnapshotSources(state.tensors(), None)
    assert len(sources._volatile) == 6, "means, variances and counts of both"
    return model, state, sources


def test_unchanged_buffers_are_not_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, state, sources = normalized()
    examined: list[str] = []
    examine = tensors.local_parts
    monkeypatch.setattr(tensors, "local_parts", lambda name, tensor: examined.append(name) or examine(name, tensor))
    for _ in range(3):
        model(torch.randn(8, 4))
        assert state.is_unchanged()
        sources.stage()
    assert examined == []
    staged = sources._staged[sources._volatile[0][0]]
    assert torch.equal(staged, model[1].running_mean)


def test_buffer_replacing_another_is_copied() -> None:
    model, state, sources = normalized()
    model[1].running_mean = torch.full((4,), 7.0)
    assert state.is_unchanged(), "of the same form"
    sources.stage()
    assert sources._staged[sources._volatile[0][0]].tolist() == [7.0] * 4


def test_buffer_with_new_memory_is_copied_from_there() -> None:
    model, _, sources = normalized()
    model[1].running_mean.data = torch.full((4,), 5.0)
    sources.stage()
    assert sources._staged[sources._volatile[0][0]].tolist() == [5.0] * 4


@pytest.mark.parametrize("value", [None, torch.zeros(5), torch.zeros(4, dtype=torch.float64)])
def test_buffer_of_another_form_is_a_change(value: torch.Tensor | None) -> None:
    model, state, _ = normalized()
    model[1].running_mean = value
    assert not state.is_unchanged()


def test_missing_buffer_is_a_change() -> None:
    model, state, _ = normalized()
    del model[1].running_mean
    assert not state.is_unchanged()
