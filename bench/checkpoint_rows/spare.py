"""The first restore of a rank that was just started on a node that holds nothing: what a loss costs where a spare steps
in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.state.tracked_state import TrackedState

from bench.checkpoint_rows.processes import Crew
from bench.checkpoint_rows.rank import Rank, Restores
from bench.checkpoint_rows.state import Model, Size
from bench.checkpoint_rows.vault_nodes import Fleet
from bench.table import Row
from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec


def first_restore(spec: GenerationSpec, rank: int, socket: str, size: Size, step: int, fresh: bool) -> Restores:
    """One restore of a new process. ``fresh``: into tensors whose memory nobody has touched; the others' has been."""
    with ExitStack() as stack:
        one = Rank(spec, rank, socket, stack)
        model = Model(size)
        if not fresh:
            model.spoil()
        state = TrackedState({"model": model.module})
        one.meet()
        began = time.perf_counter()
        restoration = Restoration(one.vault, spec, one.member, one.store)
        result = restoration.fill(state)
        said = Restores(fill=[time.perf_counter() - began], phases=[dict(result.phases_s)])
        restoration.close()
        said.sources = dict(result.bytes_by_source)
        assert result.step == step, f"{result.version} was restored, not step {step}: {result.sentence}"
        model.require(step)
        one.meet()
        return said


def rows(
    name: str,
    crew: Crew,
    fleet: Fleet,
    survivors: Sequence[str],
    size: Size,
    version: Version,
    limits_s: Sequence[float],
    repeats: int,
    replicas: int,
) -> list[Row]:
    """A spare's first restore from a peer, each time a new node's and a new process's, while the others restore theirs.

    Args:
        survivors: the nodes of the other ranks; the spare's rank is the last one.
        limits_s: seconds of a raw stream of the same bytes.
    """
    spares = []
    for number in range(repeats):
        node = f"first{number}"
        fleet.start(node)
        nodes = (*survivors, node)
        spec = fleet.generation(nodes, replicas, floor=version)
        each = [
            (spec, rank, s, size, version.step, rank == len(survivors)) for rank, s in enumerate(fleet.sockets(nodes))
        ]
        spares.append(crew.run(first_restore, each)[-1])
        fleet.lose(node)
    assert all(one.sources["own"] + one.sources["node"] == 0 for one in spares), spares[0].sources
    took, read = median(one.fill[0] for one in spares), median(one.phases[0]["read"] for one in spares)
    nbytes = spares[0].sources["remote"]
    against = f"one raw loopback stream, {nbytes / median(limits_s) / 1e9:.2f} GB/s"
    first = f"{name}: a spare's first restore from a peer"
    return [
        Row(first, took * 1e3, "ms", against=f"of it read: {read * 1e3:.0f} ms"),
        Row(f"{first}, against one raw stream", median(limits_s) / took, "x", against=against, smaller_is_better=False),
    ]
