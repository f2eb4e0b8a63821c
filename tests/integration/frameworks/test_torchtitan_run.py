"""torchtitan's own Trainer on ranks that are killed: it continues in memory, from the last step."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.peers.run import free_port
from tests.support.processes.launcher import SLOW_RANKS, launched
from tests.support.processes.process_table import is_running
from tests.support.ranks.exact_training import Fault, read_step_logs

STEPS, WORLD = 8, 2
TOKENS = 4 * 32  # of a step, as examples/train_torchtitan.py says
COMMON = ("--hang-threshold-s", "60", "--preload", "everstep_trainer.integrations.torchtitan")
TRAINING = ("-m", "tests.integration.frameworks.scripts.torchtitan_training")
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **SLOW_RANKS}
pytestmark = [pytest.mark.slow, pytest.mark.frameworks("torchtitan")]


def trained(
    folder: Path, *faults: Fault, until: int = STEPS, world: int = WORLD, options: str = "", **environment: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the step logs of ranks in an own folder, and the final state of each rank."""
    folder.mkdir(exist_ok=True)
    argv = ["--nproc-per-node", str(world), "--standby-delay-s", "0.1", *COMMON, "--state-dir"]
    argv += [str(folder / f"s{until}"), *TRAINING, str(folder), str(until), *map(str, faults)]
    with launched(folder, *argv, **ENVIRONMENT, TITAN_OPTIONS=options, **environment) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0, launcher.err
    assert "not alike on all ranks" not in launcher.err + launcher.out
    return read_step_logs(folder), [(folder / f"final-{rank}").read_text() for rank in range(world)]


def last_of_each(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return each rank's row of each step from the last generation that computed the step."""
    ordered = sorted(rows, key=lambda row: int(row["generation"]))
    return {(row["step"], row["rank"]): {k: v for k, v in row.items() if k != "generation"} for row in ordered}


def last_generations(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The rows of each step, of all ranks of the last generation that computed it."""
    last: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["generation"])):
        known = last.setdefault(row["step"], [])
        if known and known[0]["generation"] != row["generation"]:
            known.clear()
        known.append(row)
    return last


LAYOUTS = {
    "fsdp": "",
    "tensor-parallel": "--parallelism.tensor_parallel_degree 2",
    "pipeline": "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B "
    "--training.local_batch_size 2 --training.disable_cuda_graphs",
}


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_killed_ranks_change_no_loss_and_parameter(short_path: Path, options: str) -> None:
    """A rank dies in a forward pass, in a backward pass, and after the update."""
    undisturbed, final = trained(short_path / "u", options=options)
    faults = [Fault(1, 3, "forward"), Fault(0, 5, "backward"), Fault(1, 6, "updated")]
    killed, final_killed = trained(short_path / "k", *faults, options=options)
    assert {row["generation"] for row in killed} <= {1, 2, 3, 4}
    assert max(row["generation"] for row in killed) == 4, "every fault has struck"
    assert last_of_each(killed) == last_of_each(undisturbed)
    assert len(last_of_each(killed)) == WORLD * STEPS
    assert final_killed == final


COMBINED = {
    "hsdp": "--parallelism.data_parallel_replicate_degree 2",
    "fsdp-and-tensor-parallel": LAYOUTS["tensor-parallel"],
    "fsdp-and-pipeline": LAYOUTS["pipeline"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("options", COMBINED.values(), ids=COMBINED)
def test_combined_layouts_survive_kills(short_path: Path, options: str) -> None:
    undisturbed, final = trained(short_path / "u", world=4, options=options)
    killed, final_killed = trained(
        short_path / "k", Fault(3, 3, "forward"), Fault(0, 6, "updated"), world=4, options=options
    )
    assert max(row["generation"] for row in killed) == 3, "every fault has struck"
    assert last_of_each(killed) == last_of_each(undisturbed)
    assert final_killed == final


def test_lost_node_leaves_each_step_its_samples(short_path: Path) -> None:
    """One of two nodes is lost, and no spare takes its place: the other one continues with all samples of a step."""
    options = "--training.mixed_precision_param float32"  # in bfloat16 another order of sums shows in the fourth digit
    undisturbed, _ = trained(short_path / "u", options=options, TITAN_SHARED="1")
    folder, gate = short_path / "k", 5
    argv = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--job", "titan", *COMMON]
    argv += ["--state-dir", str(folder / "s"), *TRAINING, str(folder), str(STEPS)]
    shared = {**ENVIRONMENT, "TITAN_OPTIONS": options, "TITAN_SHARED": "1", "TITAN_GATE": str(gate)}
    (folder / "1").mkdir(parents=True)
    with launched(folder, *argv, **shared) as first, ExitStack() as stack:  # type: ignore[arg-type]
        first.eventually(lambda: "this is the first node" in first.err, "the node with the job's controller")
        second = stack.enter_context(launched(folder / "1", *argv, **shared))  # type: ignore[arg-type]
        for rank in range(WORLD):
            first.eventually((folder / f"gate-2-{rank}").exists, "both nodes in the step")
        for earlier in folder.glob("gate-1-*"):  # of a node that began alone
            earlier.unlink()
        below = second.descendants()
        second.process.kill()
        first.eventually((folder / "gate-1-0").exists, "the other node in the step again")
        (folder / "go").touch()
        assert first.wait() == 0, first.err
    for pid in filter(is_running, below):  # the vault of a killed launcher waits for the next one
        os.kill(pid, signal.SIGTERM)
    first.eventually(lambda: not any(map(is_running, below)), "the end of the killed launcher's vault")
    for left in (folder / "s").glob("*/run-*"):
        shutil.rmtree(Path(f"/dev/shm/everstep-{os.getuid()}") / left.name, ignore_errors=True)
    rows = last_generations(read_step_logs(folder))
    assert [len(rows[step]) for step in (gate - 1, gate, STEPS)] == [2, 1, 1], "the world has shrunk"
    for step, calm in last_generations(undisturbed).items():
        assert sorted(s for row in rows[step] for s in row["samples"]) == sorted(s for r in calm for s in r["samples"])
        (tokens,) = {row["tokens"] for row in (*rows[step], *calm)}
        assert tokens == step * TOKENS
        (loss,) = {float.fromhex(row["loss"]) for row in rows[step]}
        assert loss == pytest.approx(float.fromhex(calm[0]["loss"]), rel=1e-5), f"in step {step}"


def test_checkpoints_of_a_killed_run_continue_in_another(short_path: Path) -> None:
    """torchtitan's own manager saves in step 4, beside a rank that dies; the next job loads what it saved."""
    options = f"--lr_scheduler.total_steps {STEPS}"
    _, final = trained(short_path / "u", options=options)
    options += " --checkpoint.enable --checkpoint.interval 4 --checkpoint.no-last-save-model-only"
    folder = short_path / "k"
    earlier, _ = trained(folder, Fault(1, 4, "updated"), until=4, options=options)
    saved = sorted(path.name for path in (folder / "checkpoint").iterdir())
    rows, final_killed = trained(folder, Fault(0, 6, "forward"), options=options)
    assert saved == ["step-4"]
    assert final_killed == final
    assert {row["step"] for row in rows if row not in earlier} == {5, 6, 7, 8}
