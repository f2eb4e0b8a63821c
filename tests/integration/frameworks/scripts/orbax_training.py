"""A JAX training with Orbax's calls over checkpoints in memory. Its ranks die at requested points.

    everstep-launch ... -m tests.integration.frameworks.scripts.orbax_training FOLDER UNTIL [RANK:STEP:POINT ...]

FOLDER/orbax is the checkpoint directory, which gets every fourth step. The first line that a rank logs in a generation
contains the newest steps in memory and in the directory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import everstep
from everstep_trainer.integrations.jax import distributed
from everstep_trainer.integrations.orbax import MemoryCheckpointManager
from tests.support.ranks.exact_training import Fault, FaultInjector, StepLog, main

EVERY = 4


@jax.jit  # type: ignore[untyped-decorator]
def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    mean = jnp.mean(state["rows"])
    return {"rows": state["rows"] * 0.9 + jnp.sin(state["rows"] + mean), "mean": mean}


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    step_log, injector = StepLog(Path(folder), run), FaultInjector(faults, Path(folder), run.rank)
    with distributed(run):
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        rows = np.arange(96, dtype=np.float32).reshape(24, 4)
        state = {
            "rows": jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data"))),
            "mean": jax.device_put(np.float32(0), NamedSharding(mesh, PartitionSpec())),
        }
        options = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2)
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), note=ocp.args.JsonSave({"text": ""}))
        with MemoryCheckpointManager(run, Path(folder) / "orbax", initial=args, options=options) as manager:
            first = 0
            if (latest := manager.latest_step()) is not None:
                wanted = {"state": ocp.args.StandardRestore(state), "note": ocp.args.JsonRestore()}
                kept = manager.restore(latest, args=ocp.args.Composite(**wanted))
                assert kept.note == {"text": f"step {latest}"}
                state, first = kept.state, latest + 1
            assert manager._stored is not None
            step_log.write(-1, newest=latest, in_directory=manager._stored.latest_step())
            for step in range(first, until):
                injector.step = step
                injector.at("begun")
                state = update(state)
                note = {"text": f"step {step}"}
                args = ocp.args.Composite(state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note))
                assert manager.save(step, args=args)
                injector.at("updated")
                whole = multihost_utils.process_allgather(state["rows"], tiled=True)
                step_log.write(step, rows=np.asarray(whole).tobytes().hex()[:64], steps=list(manager.all_steps()))


if __name__ == "__main__":
    main(train, sys.argv[1:])
