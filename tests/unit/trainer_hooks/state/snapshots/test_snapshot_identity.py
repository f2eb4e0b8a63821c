"""A change of the tracked state is seen at the next request, and training alone is no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from everstep_trainer.state import tensors as identity_module
from everstep_trainer.state.tensors import StateFingerprint
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.layouts import fake_group


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.lazy = nn.Module()
        self.register_buffer("table", torch.arange(16.0).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.layers(x) @ self.table
        return mixed


class Subject:
    """A model in training, its tracked state, and every way in which a user may change the stored tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = TrackedState(self.objects())
        self.train()
        self.train()  # running statistics are known to move
        self.note_volatile_buffers()

    def note_volatile_buffers(self) -> None:
        """Note the buffers that training changes; their identity is not compared."""
        self.moving = {tensor.name for tensor in self.state.tensors() if tensor.is_volatile}

    def objects(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()

    @property
    def first(self) -> nn.Linear:
        return self.model.layers[0]  # type: ignore[return-value]

    @property
    def moments(self) -> dict[str, Any]:
        moments: dict[str, Any] = self.optimizer.state[self.first.weight]
        return moments

    def found_by_search(self) -> list[tuple[object, ...]]:
        """Return the identities that a search without short cuts finds."""
        return [
            (t.name, t.shape, t.box, t.local.dtype, *(() if t.name in self.moving else _memory(t.local)))
            for t in TrackedState(self.objects()).tensors()
        ]


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def replace_parameter(s: Subject) -> None:
    s.first.weight = nn.Parameter(s.first.weight.detach().clone())


def replace_memory(s: Subject) -> None:
    s.first.weight.data = s.first.weight.data.clone()


def shrink_in_place(s: Subject) -> None:
    s.first.bias.data = s.first.bias.data[:2]


def transpose_in_place(s: Subject) -> None:
    s.first.weight.data = s.first.weight.data.t()


def swap_tensors(s: Subject) -> None:
    torch.utils.swap_tensors(s.first.weight, nn.Parameter(torch.zeros(4, 4)))


def add_parameter(s: Subject) -> None:
    s.model.lazy.register_parameter(f"late{len(s.model.lazy._parameters)}", nn.Parameter(torch.ones(3)))


def remove_parameter(s: Subject) -> None:
    s.first.register_parameter("bias", None)


def rename_parameter(s: Subject) -> None:
    key, value = s.first._parameters.popitem()
    s.first.register_parameter(f"{key}_", value)


def fill_empty_place(s: Subject) -> None:
    s.model.layers[2].bias = nn.Parameter(torch.zeros(4))


def replace_submodule(s: Subject) -> None:
    s.model.layers[2] = nn.Linear(4, 4, bias=False)


def add_submodule(s: Subject) -> None:
    s.model.lazy.add_module(f"m{len(s.model.lazy._modules)}", nn.Linear(2, 2))


def move_to_other_type(s: Subject) -> None:
    s.first.to(torch.float64 if s.first.weight.dtype is torch.float32 else torch.float32)


def grow_running_statistics(s: Subject) -> None:
    buffers = s.model.layers[1]._buffers
    buffers["running_mean"] = torch.zeros(buffers["running_mean"].numel() + 1)  # type: ignore[union-attr]


def replace_constant(s: Subject) -> None:
    s.model._buffers["table"] = torch.ones(4, 4)


def stop_storing_a_buffer(s: Subject) -> None:
    s.model._non_persistent_buffers_set.symmetric_difference_update({"table"})


def replace_moment(s: Subject) -> None:
    if "exp_avg" in s.moments:
        s.moments["exp_avg"] = torch.zeros(4, 4)


def new_moment(s: Subject) -> None:
    s.moments["max_exp_avg_sq"] = torch.zeros(4, 4)


def load_optimizer(s: Subject) -> None:
    s.optimizer.load_state_dict(s.optimizer.state_dict())


def forget_moments(s: Subject) -> None:
    s.optimizer.state.pop(s.first.weight, None)


def track_another_parameter(s: Subject) -> None:
    s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


CHANGES: list[Callable[[Subject], None]] = [
    replace_parameter,
    replace_memory,
    shrink_in_place,
    transpose_in_place,
    swap_tensors,
    add_parameter,
    remove_parameter,
    rename_parameter,
    fill_empty_place,
    replace_submodule,
    add_submodule,
    move_to_other_type,
    grow_running_statistics,
    replace_constant,
    stop_storing_a_buffer,
    replace_moment,
    new_moment,
    load_optimizer,
    forget_moments,
    track_another_parameter,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_change_of_tracked_state_is_seen_at_once(change: Callable[[Subject], None]) -> None:
    subject = Subject()
    assert subject.state.is_unchanged()
    change(subject)
    assert not subject.state.is_unchanged()
    subject.note_volatile_buffers()
    assert subject.state.is_unchanged()


@pytest.mark.slow
@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=6))
def test_changes_are_never_missed_without_the_guards_of_torch(
    changes: list[Callable[[Subject], None]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity_module, "_Guards", None)
        _never_missed(changes)


@pytest.mark.slow
@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=6))
def test_changes_found_by_a_search_are_never_missed(changes: list[Callable[[Subject], None]]) -> None:
    _never_missed(changes)


def _never_missed(changes: list[Callable[[Subject], None]]) -> None:
    subject = Subject()
    for change in changes:
        before = subject.found_by_search()
        try:
            change(subject)
        except (AttributeError, KeyError, RuntimeError):  # such a change makes no sense after the ones before
            continue
        if subject.found_by_search() != before:
            assert not subject.state.is_unchanged(), change.__name__
        subject.note_volatile_buffers()
        assert subject.state.is_unchanged(), "a search that found everything is not asked for again"


def test_shard_with_replaced_memory_is_seen() -> None:
    """FSDP2 replaces the memory of a shard in this way."""
    with fake_group(0, (2,)) as mesh:
        parameter = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
        identity, place = StateFingerprint(), {"weight": parameter}
        identity.add_tensor(place, "weight", parameter)
        assert identity.is_unchanged()
        parameter._local_tensor = torch.zeros(2, 3)
        assert not identity.is_unchanged()


def tensors() -> list[torch.Tensor]:
    return [
        torch.randn(300, 200),
        torch.randn(16, 8, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(50, 40).t(),
        torch.randn(30, 20)[:, 3:7],
        torch.empty(0, 5),
        torch.randn(()),
        torch.randn(20).to(torch.bfloat16),
        torch.arange(7) % 2 == 0,
    ]
