"""DeepSpeed engines on ranks that are killed: ZeRO's shards come back from memory, at any world size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.peers.run import free_port
from tests.integration.frameworks.framework_run import run_training
from tests.support.processes.launcher import SLOW_RANKS, LauncherProcess, launched
from tests.support.ranks.exact_training import Fault, computed, is_computed, read_step_logs

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("deepspeed")]

STEPS, WORLD = 9, 3
FAULTS = [Fault(1, 3, "forward"), Fault(0, 6, "reduced")]
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"zero_optimization": {"stage": 0}},
    "none-bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "zero1": {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    "zero1-bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3-fp16": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 60, "sub_group_size": 300},
        "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1},
    },
}
Row = dict[str, Any]


def trained(folder: Path, config: Row, *faults: Fault) -> list[Row]:
    """Return the step logs of ranks in an own folder, those of later generations last."""
    options = ["--preload", "deepspeed"]
    rows, printed = run_training(
        folder, "deepspeed_training", STEPS, *faults, ranks=WORLD, options=options, **environment(config)
    )
    assert "not alike on all ranks" not in printed
    return rows


def environment(config: Row) -> dict[str, str]:
    return {"DEEPSPEED_CONFIG": json.dumps(config), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **SLOW_RANKS}


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_ranks_continue_bit_for_bit(short_path: Path, engine: str) -> None:
    undisturbed = computed(trained(short_path / "u", ENGINES[engine]))
    assert len(undisturbed) == STEPS * WORLD
    if "fp16" in engine:
        assert len({row["scale"] for row in undisturbed.values()}) > 2, "the loss scaler has something to lose"
    rows = trained(short_path / "k", ENGINES[engine], *FAULTS)
    assert computed(rows) == undisturbed
    assert any(row["step"] for row in rows if "restored" in row), "a version was restored"


class ThreeNodes:
    """Launchers of three nodes on loopback, with one rank each."""

    def __init__(self, folder: Path, config: Row) -> None:
        self.folder, self._config = folder, config
        self._endpoint = f"127.0.0.1:{free_port()}"

    def launch(self, stack: ExitStack, node: int) -> LauncherProcess:
        directory = self.folder / f"node{node}"
        directory.mkdir()
        argv = ["--nnodes", "2:3", "--rdzv-endpoint", self._endpoint, "--job", "three"]
        argv += ["--node-rank", str(node), "--join-wait-s", "60"]
        argv += ["--state-dir", str(self.folder / "state"), "--replicas", "2", "--hang-threshold-s", "60"]
        argv += ["--segment-dir", str(self.folder / "memory")]  # in /dev/shm a killed node would leave its own
        argv += [
            "--preload",
            "deepspeed",
            "-m",
            "tests.integration.frameworks.scripts.deepspeed_training",
            str(self.folder),
            str(STEPS),
        ]
        return stack.enter_context(launched(directory, *argv, **environment(self._config)))  # type: ignore[arg-type]

    def rows(self) -> Iterator[Row]:
        yield from read_step_logs(self.folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_lost_node_reshards_over_the_others(short_path: Path, stage: int) -> None:
    nodes = ThreeNodes(short_path, {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 60}})
    gate = short_path / "gate"
    gate.write_text("4")
    with ExitStack() as stack:
        first, *others = [nodes.launch(stack, node) for node in range(3)]
        first.eventually(lambda: is_computed(short_path, 1, 4, ranks=3), "step 4 on three ranks")
        others[-1].kill_all()
        gate.write_text(str(STEPS))
        for launcher in (first, others[0]):
            assert launcher.wait() == 0, launcher.err
    rows = list(nodes.rows())
    restored = [row for row in rows if "restored" in row]
    assert {row["world"] for row in restored} == {2}, "three ranks, then two"
    before = {row["step"]: row["state"] for row in rows if row["generation"] == 1}
    assert {row["restored"] for row in restored} == {before[restored[0]["step"]]}, "the same state in other shards"
    last = [row for row in rows if row["step"] == STEPS]
    assert len({row["state"] for row in last}) == 1
    assert sorted(i for row in last for i in row["samples"]) == sorted({i for row in last for i in row["samples"]})
    assert {tuple(row["counters"]) for row in last} == {(STEPS, 2 * STEPS, 0)}
