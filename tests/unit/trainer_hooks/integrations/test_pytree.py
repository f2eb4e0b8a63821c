"""Pytrees of JAX as parts of global arrays: every kind of leaf, and other shardings after a restore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from everstep.errors import NotRestorable
from tests.support.processes.fork_pool import ForkPool

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("jax")]


def filled(targets: Iterable[Any], sources: Iterable[Any]) -> None:
    """Fill parts from those that overlap them, as a restore does."""
    from everstep_trainer.slots.copy import view_of_box

    for target in targets:
        volume = 0
        for source in (source for source in sources if source.name == target.name):
            if (common := target.box.intersect(source.box)) is not None:
                view_of_box(target.local, target.box, common).copy_(view_of_box(source.local, source.box, common))
                volume += common.volume
        assert volume == target.box.volume, target.name


def leaves_of_all_kinds(devices: int, number: int) -> dict[str, Any]:
    """Sharded over this number of four devices; ``number`` is in all values."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    grid = np.arange(64, dtype=np.float32).reshape(8, 8) + number
    kinds = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "int4", "bool")
    return {
        "rows": jax.device_put(grid, NamedSharding(mesh, PartitionSpec("x"))),
        "columns": jax.device_put(grid, NamedSharding(mesh, PartitionSpec(None, "x"))),
        "whole": jax.device_put(grid, NamedSharding(mesh, PartitionSpec())),
        "kinds": [(jnp.arange(4) % (number + 1)).astype(kind) for kind in kinds],
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(number + 0.5),
        "weak": jax.jit(lambda: number + 1.5)(),
        "keys": jax.random.split(jax.random.key(number), 2),
        "numpy": grid[::2],
        "number": number,
        "text": str(number),
        "nothing": None,
    }


def facts(tree: Any) -> list[Any]:
    """Return the values that must be equal after a restore."""
    import jax

    def fact(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        return str(leaf.dtype), leaf.shape, data.tobytes(), getattr(leaf, "weak_type", None)

    return [fact(leaf) for leaf in jax.tree.leaves(tree)]


def restore_into_another_sharding(before: int, after: int) -> bool:
    import jax

    from everstep_trainer.integrations.jax import Pytree

    jax.config.update("jax_num_cpu_devices", 4)
    stored, before_it = Pytree(leaves_of_all_kinds(before, 3)), leaves_of_all_kinds(after, 1)
    restored = Pytree(before_it)
    parts = restored.make_restore_parts({part.name for part in stored.array_parts()})
    filled(parts, stored.array_parts())
    restored.load_state_dict(stored.state_dict())
    restored.adopt_restored()
    assert facts(restored.value) == facts(stored.value)
    for name in ("rows", "columns", "whole"):
        assert restored.value[name].sharding == before_it[name].sharding
    assert restored.value["scalar"].committed is stored.value["scalar"].committed is False
    jax.block_until_ready(
        jax.jit(lambda tree: tree["rows"] * tree["scalar"])({name: restored.value[name] for name in ("rows", "scalar")})
    )
    return True


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 2)])
def test_pytree_restores_into_another_sharding(forks: ForkPool, before: int, after: int) -> None:
    assert forks.start(restore_into_another_sharding, before, after).result()


def donate_stored_arrays() -> bool:
    import jax
    import jax.numpy as jnp

    from everstep_trainer.integrations.jax import Pytree

    state = Pytree({"weights": jnp.arange(1 << 16, dtype=jnp.float32)})
    (part,) = state.array_parts()
    assert part.local.data_ptr() == state.value["weights"].unsafe_buffer_pointer(), "not copied"
    assert state.array_parts()[0] is part
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for _ in range(3):
        state.value = update(state.value)
    assert part.local[:3].tolist() == [0.0, 1.0, 2.0]
    assert state.array_parts()[0].local[:3].tolist() == [3.0, 4.0, 5.0]
    return True


def test_donated_arrays_stay_until_they_are_copied(forks: ForkPool) -> None:
    assert forks.start(donate_stored_arrays).result()


def refuse_odd_pytrees() -> list[str]:
    import jax.numpy as jnp

    from everstep_trainer.integrations.jax import Pytree

    errors = []
    try:
        Pytree({"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})
    except ValueError as error:
        errors.append(str(error))
    try:
        Pytree({"a": 1, "b": 2}).load_state_dict({"a": 3})
    except NotRestorable as error:
        errors.append(str(error))
    return errors


def test_pytree_refuses_unfit_leaves_with_advice(forks: ForkPool) -> None:
    assert forks.start(refuse_odd_pytrees).result() == [
        "two leaves of the pytree have one name: take keys without dots",
        "the stored pytree has no b: restore with the same structure",
    ]


def test_errors_of_collectives_are_lost_peers(forks: ForkPool) -> None:
    assert forks.start(judge_errors).result() == [True, True, False, False]


def judge_errors() -> list[bool]:
    from everstep_trainer.integrations.jax import is_lost_peer

    errors = [
        ValueError("UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"),
        RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service."),
        ValueError("shapes do not match"),
        KeyError("Gloo all-reduce failed"),
    ]
    return [is_lost_peer(error) for error in errors]
