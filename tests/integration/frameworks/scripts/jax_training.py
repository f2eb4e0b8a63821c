"""A training with JAX in a training function. Its ranks log each step, and die at requested points.

    everstep-launch ... -m tests.integration.frameworks.scripts.jax_training FOLDER UNTIL [RANK:STEP:POINT ...]

Parameters and moments are sharded over all processes, the counter and the random key are replicated. A rank dies where
a step has ``begun``, or after it was ``updated``. FOLDER/gate may name a step that no process goes beyond.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import everstep
from everstep_trainer.integrations.jax import Pytree, distributed
from tests.support.ranks.exact_training import SEED, Fault, FaultInjector, StepLog, main, wait_at_gate

ROWS, WIDTH, SAMPLES, BATCH = 24, 6, 480, 24


def initial_state(mesh: Mesh) -> dict[str, Any]:
    def sharded(value: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    whole = NamedSharding(mesh, PartitionSpec())
    numbers = np.random.default_rng(SEED).standard_normal((ROWS, WIDTH), dtype=np.float32)
    return {
        "weights": sharded(numbers),
        "mean": sharded(np.zeros_like(numbers)),
        "half": sharded(numbers.astype(jnp.bfloat16)),
        "count": jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=whole)(),
        "key": jax.jit(jax.random.key, out_shardings=whole)(SEED),
        "seen": np.zeros((1,), np.int64),
        "note": "begun",
    }


@jax.jit  # type: ignore[untyped-decorator]
def update(arrays: dict[str, jax.Array], inputs: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    key, drawn = jax.random.split(arrays["key"])

    def loss_of(weights: jax.Array) -> jax.Array:
        noisy = inputs + 0.1 * jax.random.normal(drawn, inputs.shape)
        return jnp.mean((jnp.tanh(noisy @ weights) - inputs[:, :WIDTH]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(arrays["weights"])
    mean = 0.9 * arrays["mean"] + gradient
    weights = arrays["weights"] - 0.1 * mean
    half = weights.astype(jnp.bfloat16)
    return {"weights": weights, "mean": mean, "half": half, "count": arrays["count"] + 1, "key": key}, loss


def jax_arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, jax.Array)}


def fingerprint(arrays: dict[str, Any]) -> str:
    """Return a digest of all full arrays. This is a collective."""
    numbers = {**arrays, "key": jax.random.key_data(arrays["key"])}
    whole = multihost_utils.process_allgather(numbers, tiled=True)
    return hashlib.sha256(b"".join(np.asarray(whole[name]).tobytes() for name in sorted(whole))).hexdigest()[:16]


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    step_log, injector = StepLog(Path(folder), run), FaultInjector(faults, Path(folder), run.rank)
    with distributed(run):
        assert (jax.process_index(), jax.process_count()) == (run.rank, run.world_size)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        inputs = np.random.default_rng(SEED + 1).standard_normal((SAMPLES, ROWS), dtype=np.float32)
        sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=SEED)
        state = Pytree(initial_state(mesh))
        run.track(state=state)
        if run.last_finished_step:
            step_log.write(run.last_finished_step, restored=fingerprint(jax_arrays(state.value)))
        for step in run.steps(until=until, seed=SEED):
            wait_at_gate(Path(folder), step)
            injector.step = step
            injector.at("begun")
            batch = jax.make_array_from_process_local_data(
                NamedSharding(mesh, PartitionSpec("data")), inputs[np.asarray(sampler.indices(step))]
            )
            others = {"seen": state.value["seen"] + BATCH, "note": f"after {step}"}
            arrays, loss = update(jax_arrays(state.value), batch)
            state.value = {**arrays, **others}
            injector.at("updated")
            assert (int(state.value["count"]), int(state.value["seen"][0])) == (step, step * BATCH)
            step_log.write(step, loss=float(loss).hex(), state=fingerprint(arrays), note=state.value["note"])


if __name__ == "__main__":
    main(train, sys.argv[1:])
