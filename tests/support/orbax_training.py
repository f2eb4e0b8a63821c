"""A training by JAX with Orbax's calls, whose CheckpointManager has memory in front; ranks die where told.

    python -m everstep_trainer.launch --nproc-per-node 2 -m tests.support.orbax_training FOLDER UNTIL [RANK:STEP:POINT
    ...]

FOLDER/orbax is the directory, which gets every fourth step. A diary's first line of a generation says what was newest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from everstep_trainer.integrations.jax import distributed
from everstep_trainer.integrations.orbax import MemoryCheckpointManager
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import everstep
from tests.support.exact_training import Diary, Fault, Faults, main

EVERY = 4


@jax.jit
def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    mean = jnp.mean(state["rows"])
    return {"rows": state["rows"] * 0.9 + jnp.sin(state["rows"] + mean), "mean": mean}


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    diary, dying = Diary(Path(folder), run), Faults(faults, Path(folder), run.rank)
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
            diary.write(-1, newest=latest, in_directory=manager._stored.latest_step())
            for step in range(first, until):
                dying.step = step
                dying.at("begun")
                state = update(state)
                note = {"text": f"step {step}"}
                args = ocp.args.Composite(state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note))
                assert manager.save(step, args=args)
                dying.at("updated")
                whole = multihost_utils.process_allgather(state["rows"], tiled=True)
                diary.write(step, rows=np.asarray(whole).tobytes().hex()[:64], steps=list(manager.all_steps()))


if __name__ == "__main__":
    main(train, sys.argv[1:])
