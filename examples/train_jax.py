"""Trains a small network with JAX, data-parallel over all processes; parameters and moments are sharded.

    python examples/train_jax.py --steps 20                                        one process
    torchrun --nproc-per-node 2 examples/train_jax.py --steps 20                   two
    python -m everstep_trainer.launch --nproc-per-node 2 examples/train_jax.py     two that survive

Lines that Everstep needs are marked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from final_line import print_line
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import everstep  # everstep
from everstep_trainer.integrations.jax import Pytree, distributed  # everstep

WIDTH, SAMPLES, BATCH = 64, 4096, 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="total updates")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


ARGS = arguments()


def initial_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(17), 3)
    shapes = {"first": (8, WIDTH), "second": (WIDTH, WIDTH), "last": (WIDTH, 1)}
    parameters = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return {"parameters": parameters, "mean": zeros, "square": zeros, "count": jnp.zeros((), jnp.int32)}


def sharded(make: Callable[[], Any], mesh: jax.sharding.Mesh) -> Any:
    """Return what ``make`` returns, with rows divided among all devices where that leaves no rest."""

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        is_divisible = leaf.ndim > 0 and leaf.shape[0] % mesh.devices.size == 0
        return NamedSharding(mesh, PartitionSpec("data") if is_divisible else PartitionSpec())

    return jax.jit(make, out_shardings=jax.tree.map(place, jax.eval_shape(make)))()


def loss_of(parameters: dict[str, jax.Array], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ parameters["first"])
    hidden = jnp.tanh(hidden @ parameters["second"])
    return jnp.mean((hidden @ parameters["last"] - targets) ** 2)


@jax.jit
def update(state: dict[str, Any], inputs: jax.Array, targets: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Make one update by Adam."""
    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"], inputs, targets)
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["square"], gradients)

    def change(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)

    parameters = jax.tree.map(change, state["parameters"], mean, square)
    return {"parameters": parameters, "mean": mean, "square": square, "count": count}, loss


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(5).standard_normal((SAMPLES, 8), dtype=np.float32)
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True))


def digest(parameters: dict[str, jax.Array]) -> str:
    whole = multihost_utils.process_allgather(parameters, tiled=True)
    return xxhash.xxh64_hexdigest(b"".join(np.asarray(whole[name]).tobytes() for name in sorted(whole)))


def train(run: everstep.Run) -> None:  # everstep
    with distributed(run):  # everstep
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        by_sample = NamedSharding(mesh, PartitionSpec("data"))
        inputs, targets = data()
        sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=3)  # everstep
        state = Pytree(sharded(initial_state, mesh))  # everstep
        run.track(state=state)  # everstep
        loss = jnp.full((), jnp.nan)  # if a restored run has no step left
        for step in run.steps(until=ARGS.steps):  # everstep
            mine = np.asarray(sampler.indices(step))
            batch = [jax.make_array_from_process_local_data(by_sample, part[mine]) for part in (inputs, targets)]
            state.value, loss = update(state.value, *batch)
            run.report(loss=loss)
            time.sleep(ARGS.pace)
        print_line(run.rank, ARGS.steps, float(loss), digest(state.value["parameters"]))


if __name__ == "__main__":
    everstep.main(train, settings=everstep.HookSettings(backend="gloo"))  # everstep: JAX has the GPUs
