"""Megatron-core on ranks that are killed: parameters and optimizer shards come back from memory, in other layouts too.

Megatron's tensors lie on the host here (examples/megatron_on_cpu.py); its code is its own.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.peers.run import free_port
from tests.integration.frameworks.framework_run import run_training
from tests.support.processes.launcher import SLOW_RANKS, LauncherProcess, launched
from tests.support.ranks.exact_training import Fault, computed, is_computed, read_step_logs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks("megatron"),
]

STEPS, WORLD = 7, 2
FAULTS = [Fault(1, 3, "reduced"), Fault(0, 5, "updated")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"distributed": True},
    "replicas-bf16": {"distributed": True, "bf16": True},
    "tensor-bf16": {"tp": 2, "bf16": True, "distributed": False},
    "pipeline": {"pp": 2, "distributed": False},
}
Row = dict[str, Any]


def environment(*layouts: Row) -> dict[str, str]:
    return {"MEGATRON_LAYOUTS": json.dumps(layouts), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **SLOW_RANKS}


def trained(folder: Path, layouts: list[Row], *faults: Fault) -> list[Row]:
    """Return the step logs of ranks in an own folder, those of later generations last. Layouts go by generation."""
    options = ["--preload", "megatron.core"]
    return run_training(
        folder, "megatron_training", STEPS, *faults, ranks=WORLD, options=options, **environment(*layouts)
    )[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_ranks_continue_bit_for_bit(short_path: Path, layout: str) -> None:
    undisturbed = computed(trained(short_path / "u", [LAYOUTS[layout]]))
    assert len(undisturbed) == STEPS * WORLD
    assert len({row["state"] for row in undisturbed.values()}) == STEPS
    rows = trained(short_path / "k", [LAYOUTS[layout]], *FAULTS)
    assert computed(rows) == undisturbed
    assert any(row["step"] for row in rows if "restored" in row), "a version was restored"


def test_other_parallel_sizes_take_over_state(short_path: Path) -> None:
    layouts = [{**sizes, "bf16": True} for sizes in ({"tp": 2}, {"pp": 2}, {})]
    rows = trained(short_path / "r", layouts, *FAULTS)
    restored = [row for row in rows if "restored" in row]
    assert {row["generation"] for row in restored} == {2, 3}, "tensor parallelism, then a pipeline, then replicas"
    for row in restored:
        before = [other for other in rows if "state" in other and other["generation"] < row["generation"]]
        assert row["restored"] in {other["state"] for other in before if other["step"] == row["step"]}
    assert len({row["loss"] for row in rows if row.get("step") == STEPS and "loss" in row}) == 1


def launch_node(stack: ExitStack, folder: Path, node: int, endpoint: str) -> LauncherProcess:
    """One of up to three nodes on loopback, with one rank."""
    directory = folder / f"node{node}"
    directory.mkdir()
    argv = ["--nnodes", "2:3", "--rdzv-endpoint", endpoint, "--job", "three"]
    argv += ["--node-rank", str(node), "--join-wait-s", "60"]
    argv += ["--state-dir", str(folder / "state"), "--replicas", "2", "--hang-threshold-s", "60"]
    argv += ["--segment-dir", str(folder / "memory")]  # in /dev/shm a killed node would leave its own
    argv += [
        "--preload",
        "megatron.core",
        "-m",
        "tests.integration.frameworks.scripts.megatron_training",
        str(folder),
        str(STEPS),
    ]
    return stack.enter_context(launched(directory, *argv, **environment({"distributed": True, "bf16": True})))  # type: ignore[arg-type]


def test_lost_node_reshards_distributed_optimizer(short_path: Path) -> None:
    gate, endpoint = short_path / "gate", f"127.0.0.1:{free_port()}"
    gate.write_text("4")
    with ExitStack() as stack:
        first, *others = [launch_node(stack, short_path, node, endpoint) for node in range(3)]
        first.eventually(lambda: is_computed(short_path, 1, 4, ranks=3), "step 4 on three ranks")
        others[-1].kill_all()
        gate.write_text(str(STEPS))
        for launcher in (first, others[0]):
            assert launcher.wait() == 0, launcher.err
    rows = read_step_logs(short_path)
    restored = [row for row in rows if "restored" in row]
    assert {row["world"] for row in restored} == {2}, "three ranks, then two"
    before = {row["step"]: row["state"] for row in rows if row["generation"] == 1}
    assert {row["restored"] for row in restored} == {before[restored[0]["step"]]}, "the same state in other shards"
    last = [row for row in rows if row["step"] == STEPS]
    assert len({row["state"] for row in last}) == 1
    assert len({i for row in last for i in row["samples"]}) == 12
