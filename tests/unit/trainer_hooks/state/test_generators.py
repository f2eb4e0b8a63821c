"""Random generators as tracked objects: a restore continues their streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.errors import NotRestorable
from everstep.wire.v1.training import JobSpec, RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.generators import wrap_generators
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import vaults

KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.randn(3, generator=g).tolist()),
    "numpy": (np.random.default_rng, lambda g: g.standard_normal(3).tolist()),
    "bits": (np.random.Philox, lambda g: g.random_raw(3).tolist()),
    "mt19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.integers(9, size=5).tolist()),
    "legacy": (np.random.RandomState, lambda g: g.standard_normal(3).tolist()),
    "random": (random.Random, lambda g: [g.random(), g.gauss(0, 1), g.randrange(1 << 70)]),
}


@pytest.mark.promise("tracked-generators")
@pytest.mark.parametrize("kind", KINDS)
def test_restored_generator_continues_its_stream(kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make(5)
    draw(generator)
    stored = decode_blob(encode_blob(wrap_generators({"rng": generator}, 0, 1)["rng"].state_dict()))  # type: ignore[attr-defined]
    wanted = [draw(generator) for _ in range(3)]
    fresh = make(6)
    wrap_generators({"rng": fresh}, 0, 1)["rng"].load_state_dict(stored)  # type: ignore[attr-defined]
    assert [draw(fresh) for _ in range(3)] == wanted


def test_generator_of_another_kind_is_refused() -> None:
    stored = wrap_generators({"rng": np.random.default_rng(1)}, 0, 1)["rng"].state_dict()  # type: ignore[attr-defined]
    other = wrap_generators({"rng": random.Random(1)}, 0, 1)["rng"]
    with pytest.raises(NotRestorable, match=r"rng is a generator of the kind random\.Random, and was stored as numpy"):
        other.load_state_dict(stored)  # type: ignore[attr-defined]


def objects(rank: int, world: int, seed: int) -> dict[str, object]:
    return {"model": nn.Linear(64, 64), **wrap_generators({"rng": np.random.default_rng(seed)}, rank, world)}


@pytest.mark.promise("tracked-generators")
@pytest.mark.parametrize("alike", [True, False])
def test_generator_is_taken_from_other_ranks_if_all_agree(program_forks: ForkPool, alike: bool) -> None:
    job = JobSpec(job=JOB, nproc_per_node=2)
    spec, store = generation(1, ranks=[("n1", 0), ("n1", 1)], spec=job), HashStore()
    with vaults(program_forks) as fleet, ExitStack() as stack:
        vault = fleet.start("n1", "--scrub-interval-s", "0")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        stack.callback(client.close)
        snapshotters = []
        for rank, member in enumerate(spec.roster):
            state = TrackedState(objects(rank, 2, 5 if alike else rank))
            snapshotters.append(Snapshotter(client, state, spec, member, store, lambda _: None))
        for call in (Snapshotter.wait, lambda snapshots: snapshots.begin(1), Snapshotter.wait):
            for snapshots in snapshotters:
                call(snapshots)
        for snapshots in snapshotters:
            snapshots.close(finish=True)
        alone = generation(2, ranks=[("n1", 0)], restore=RestoreRule(), spec=JobSpec(job=JOB))
        fresh = np.random.default_rng(99)
        state = TrackedState({"model": nn.Linear(64, 64), **wrap_generators({"rng": fresh}, 0, 1)})
        restoration = Restoration(client, alone, alone.roster[0], HashStore())
        if alike:
            restoration.fill(state)
            assert fresh.random() == np.random.default_rng(5).random()
        else:
            with pytest.raises(NotRestorable, match=r"rng was stored on 2 ranks, and there are 1 now.*differ between"):
                restoration.fill(state)
        restoration.close()
