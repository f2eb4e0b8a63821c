"""Facts about torch that are found by its features, not by its version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from everstep_trainer.base.torch_facts import read_torch, uses_nccl2


def _create_nccl_process_group() -> None: ...
def _create_nccl2_process_group() -> None: ...


def _registered(creator: Any) -> Any:
    return SimpleNamespace(
        Backend=SimpleNamespace(_plugins={"NCCL": SimpleNamespace(creator_fn=creator)}, _ensure_backend_registered=str)
    )


@pytest.mark.parametrize(
    ("distributed", "expected"),
    [
        (_registered(_create_nccl2_process_group), True),
        (_registered(_create_nccl_process_group), False),
        (_registered(None), False),
        (SimpleNamespace(Backend=SimpleNamespace(_plugins={})), False),
        (SimpleNamespace(), False),
    ],
    ids=["nccl2", "older", "no_creator", "not_registered", "not_built"],
)
def test_nccl2_is_told_by_its_registration(distributed: Any, expected: bool) -> None:
    assert uses_nccl2(distributed) is expected


def test_facts_name_the_installed_torch() -> None:
    facts = read_torch()
    assert not facts.error
    assert facts.has_gloo is dist.is_gloo_available()
    assert facts.uses_nccl2 is uses_nccl2(dist)
