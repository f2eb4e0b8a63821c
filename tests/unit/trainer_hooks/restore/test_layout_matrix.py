"""Restoring each layout into others, on as many ranks and on more and fewer, with real processes; what was gathered by
name before a regrouping is what is gathered after it, to the bit. The nightly tests restore every one into every other.

Sizes of the model are drawn for each walk, one smaller than the number of ranks; ``EVERSTEP_MATRIX_SEED`` draws others.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore

from everstep.ids import Version
from everstep.layout.manifests import chunk
from everstep.wire.v1.training import GenerationSpec, RestoreRule
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ChildFailed, ForkPool
from tests.support.ranks.layouts import Layout, layouts_of
from tests.support.vaults.vault_process import Vaults, vaults
from tests.unit.trainer_hooks.restore.layout_changes import GenerationResult, run_generations

WORLD = 4
DEADLINE_S = 110.0
PARTS = 3
"""So that each of them ends in time on a busy machine."""
SEED = int(os.environ.get("EVERSTEP_MATRIX_SEED", "1"))


def drawn(part: int) -> dict[str, Any]:
    """Draw the sizes of a model. One of its layers is narrower than any mesh."""
    chance = random.Random(f"{SEED}/{part}")
    hidden = [chance.randint(1, WORLD - 1), *(chance.randint(WORLD, 13) for _ in range(3))]
    return {"width": chance.randint(2, 9), "hidden": tuple(chance.sample(hidden, 4))}


@pytest.fixture
def fleet(forks: ForkPool) -> Iterator[Vaults]:
    with vaults(forks) as running:
        yield running


def walk_all_pairs(names: list[str]) -> list[str]:
    """Return a walk in which each name is followed once by each name, itself included (Hierholzer's algorithm)."""
    ahead = {name: list(names) for name in names}
    path, done = [names[0]], []
    while path:
        if ahead[path[-1]]:
            path.append(ahead[path[-1]].pop())
        else:
            done.append(path.pop())
    return done[::-1]


def run_all(
    forks: ForkPool, fleet: Vaults, layouts: Iterable[Layout], nodes: Sequence[str] = ("n1",) * WORLD
) -> list[GenerationResult]:
    """Run a generation of each layout, one after another; return the restored and trained state of each. ``nodes``: one
    for all ranks, or one for each."""
    running = {node: fleet.start(node) for node in dict.fromkeys(nodes)}
    fleet.configure()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = [(spec_of(number, layout, store.port, nodes), layout) for number, layout in enumerate(layouts, 1)]
    sockets = [str(running[node].run_dir / "vault.sock") for node in nodes]
    processes = [forks.start(run_generations, parts, rank, sockets[rank]) for rank in range(WORLD)]
    results: list[list[GenerationResult]] = [process.result(DEADLINE_S) for process in processes]
    return results[0]


def spec_of(number: int, layout: Layout, port: int, nodes: Sequence[str]) -> GenerationSpec:
    ranks = [(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes[: layout.world])]
    return generation(number, ranks=ranks, store=f"127.0.0.1:{port}", restore=RestoreRule())


def differences(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not np.array_equal(first[name], second[name])]


def test_walk_contains_every_ordered_pair_once() -> None:
    steps = walk_all_pairs(["a", "b", "c"])
    assert len(steps) == 10
    assert len(set(itertools.pairwise(steps))) == 9


@pytest.mark.promise("layout-change")
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_every_layout_is_restored_into_every_other_to_the_bit(forks: ForkPool, fleet: Vaults, part: int) -> None:
    layouts = {name: layout for world in (2, 3, 4) for name, layout in layouts_of(world).items()}
    first, ways = chunk(len(layouts) ** 2, part, PARTS)
    names, sizes = walk_all_pairs(sorted(layouts))[first : first + ways + 1], drawn(part)
    results = run_all(forks, fleet, [msgspec.structs.replace(layouts[name], **sizes) for name in names])
    assert not wrong_ways(names, results), sizes
    assert len(results) == ways + 1


@pytest.mark.promise("layout-change")
@pytest.mark.slow
def test_each_layout_is_restored_into_another_to_the_bit(forks: ForkPool, fleet: Vaults) -> None:
    layouts = {name: layout for world in (2, 3, 4) for name, layout in layouts_of(world).items()}
    names, sizes = random.Random(SEED).sample(sorted(layouts), len(layouts)), drawn(0)
    results = run_all(forks, fleet, [msgspec.structs.replace(layouts[name], **sizes) for name in names])
    assert not wrong_ways(names, results), sizes
    assert len(results) == len(names)


def wrong_ways(names: Sequence[str], results: Sequence[GenerationResult]) -> list[Any]:
    """Return the pairs of layouts whose restored state differs from the state before."""
    wrong: list[Any] = []
    for number, (before, after) in enumerate(itertools.pairwise(results), 2):
        way = f"{names[number - 2]} -> {names[number - 1]}"
        if after["restored"].version != Version(number - 1, number - 1):
            wrong.append((way, after["restored"]))
        elif found := differences(before["after"], after["before"]):
            wrong.append((way, found[:5]))
    return wrong


@pytest.mark.promise("layout-change")
@pytest.mark.slow
def test_objects_lost_on_all_ranks_are_named(forks: ForkPool, fleet: Vaults) -> None:
    """One stage of a pipeline is not the model, and must not be restored as the model."""
    with pytest.raises(
        ChildFailed, match=r"NotRestorable: the tracked state.* tensors are gone from all ranks \(model\."
    ):
        run_all(forks, fleet, [Layout(pp=2), Layout(replicate=2, lost=2)])
