"""Exact mode under fully_shard: however a model is sharded, and over however many ranks, its numbers are the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import TCPStore

from everstep_trainer.base.progress import CollectiveTimer
from everstep_trainer.parallel.exact.summation import PartialSums, clip_grad_norm_fixed_order, interleaved_virtual_ranks
from tests.support.processes.fork_pool import ForkPool
from tests.unit.trainer_hooks.parallel.exact import virtual_shards
from tests.unit.trainer_hooks.parallel.exact.virtual_shards import (
    HYBRID,
    LAYOUTS,
    STEPS,
    WORLDS,
    trained_without_shards,
)


def on_ranks(forks: Any, function: Any, world: int) -> list[dict[str, Any]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forks.start(function, rank, world, store.port) for rank in range(world)]
    return [rank.result() for rank in ranks]


@pytest.fixture(scope="module")
def results(session_forks: Any) -> dict[int, list[dict[str, Any]]]:
    return {world: on_ranks(session_forks, virtual_shards.trained_in_layouts, world) for world in HYBRID}


@pytest.mark.promise("exact-mode-sharded")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_model_is_bit_identical_on_any_world_size(
    results: dict[int, list[dict[str, Any]]], layout: str
) -> None:
    of_all = [rank[layout] for ranks in results.values() for rank in ranks if layout in rank]
    assert len(of_all) == sum(WORLDS.get(layout, HYBRID))
    assert all(steps == of_all[0] for steps in of_all)
    assert len(set(of_all[0])) == STEPS, "it trained"


@pytest.mark.promise("exact-mode-sharded")
@pytest.mark.parametrize("layout", ["shards", "replicas of shards", "one layer"])
def test_sharded_model_matches_the_unsharded_bits(results: dict[int, list[dict[str, Any]]], layout: str) -> None:
    assert results[1][0][layout] == trained_without_shards()


def test_inexact_configurations_are_refused_with_advice(forks: ForkPool) -> None:
    errors = on_ranks(forks, virtual_shards.refused_cases, 4)
    assert errors[0] == errors[1] == errors[2] == errors[3]
    words = {
        "tensor parallel": "weight is a DTensor that fully_shard did not make: .* nor a pipeline. Go on without",
        "tensor parallel in shards": "the model is laid out as .*: virtual ranks take .* nor a pipeline. Go on without",
        "a part of the ranks": "the model is laid out as .* over 2 of 4 ranks: virtual ranks take",
        "a divide factor": "Scale the loss instead",
        "a narrow parameter": "keep parameters in the wider of the two",
        "fused": "needs fused=False",
        "Adafactor": "such as AdamW or SGD",
    }
    assert errors[0].keys() == words.keys()
    for case, pattern in words.items():
        assert re.search(pattern, errors[0][case]), errors[0][case]


def gradients_of(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).double()


def test_fixed_order_norm_matches_torch_up_to_rounding() -> None:
    shapes = [(5, 7), (1, 3), (4,), (), (0, 3), (2, 3, 5)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters[1:]:
        parameter.grad = torch.randn_like(parameter)
    expected = gradients_of(parameters[1:])
    norm = clip_grad_norm_fixed_order(parameters, 0.5, CollectiveTimer(lambda _: None))
    assert norm.item() == pytest.approx(expected.norm().item(), rel=1e-6)
    clipped = gradients_of(parameters[1:])
    assert torch.allclose(clipped, expected * 0.5 / expected.norm(), rtol=1e-5)
    clip_grad_norm_fixed_order(parameters, 9.0, CollectiveTimer(lambda _: None))
    assert torch.equal(clipped, gradients_of(parameters[1:])), "small enough"


@pytest.mark.promise("exact-mode-sharded")
@given(st.data(), st.integers(1, 70))
def test_virtual_ranks_in_turn_hold_few_partial_sums(data: st.DataObject, virtual: int) -> None:
    world = data.draw(st.integers(1, virtual))
    played = [interleaved_virtual_ranks(rank, world, virtual) for rank in range(world)]
    partial: PartialSums[int] = PartialSums(virtual, lambda a, b: a + b)
    for turn in range(max(map(len, played))):
        for rank in data.draw(st.permutations(range(world))):
            for leaf in played[rank][turn : turn + 1]:
                partial.add((leaf, leaf + 1), 1)
        assert len(partial.parts) <= virtual.bit_length()
    assert partial.parts == [((0, virtual), virtual)]
