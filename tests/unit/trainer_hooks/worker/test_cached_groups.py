"""Process groups of an earlier generation that a script keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep_trainer.worker.cached_groups import MAX_OBJECTS, cached_groups


@pytest.fixture
def group() -> dist.ProcessGroup:
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's stub lacks the form without a store


def script(**variables: Any) -> ModuleType:
    module = ModuleType("train")
    module.__file__ = "/home/user/train.py"
    vars(module).update(variables)
    return module


def test_group_in_a_global_variable_is_named(group: dist.ProcessGroup) -> None:
    assert cached_groups([script(GROUP=group, lr=0.1)]) == ["train.py: GROUP"]


def test_group_kept_by_functools_cache_is_named(group: dist.ProcessGroup) -> None:
    @functools.cache
    def make() -> dist.ProcessGroup:
        return group

    make()
    assert cached_groups([script(make=make)]) == ["train.py: make"]


def test_group_in_a_closure_is_named(group: dist.ProcessGroup) -> None:
    def make_reduce() -> Callable[[torch.Tensor], object]:
        return lambda tensor: dist.all_reduce(tensor, group=group)

    assert cached_groups([script(reduce=make_reduce())]) == ["train.py: reduce"]


def test_ordinary_variables_are_not_named() -> None:
    """Also not the modules, functions and classes of libraries, from which every group can be reached."""
    ordinary = {"torch": torch, "dist": dist, "all_reduce": dist.all_reduce, "Tensor": torch.Tensor}
    model = torch.nn.Linear(2, 2)
    more = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rows": list(range(10_000))}
    assert cached_groups([script(**ordinary, **more, test=test_ordinary_variables_are_not_named)]) == []


def test_scan_ends_after_a_bounded_number_of_objects(group: dist.ProcessGroup) -> None:
    chain: list[Any] = [group]
    for _ in range(2 * MAX_OBJECTS):
        chain = [chain]
    assert cached_groups([script(chain=chain)]) == []
