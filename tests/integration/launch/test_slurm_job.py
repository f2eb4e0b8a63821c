"""The shipped batch script on a real Slurm, whose nodes run on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import step_log
from tests.support.processes.process_table import command_line, is_running, state_and_parent
from tests.support.processes.waiting import until
from tests.support.services import slurm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "deploy" / "slurm" / "everstep.sbatch"
DEADLINE_S = 180.0

TRAIN = """
import os, pathlib, signal, time, torch
import everstep

FOLDER = pathlib.Path(__file__).parent
GATE = int(os.environ.get("GATE", "20"))
signal.signal(signal.SIGUSR1, lambda *_: (FOLDER / f"usr1-{os.environ.get('RANK')}").touch())

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=GATE + 20):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        with (FOLDER / "steps").open("a") as file:
            file.write(f"{os.environ['RANK']} {step} {os.getpid()}\\n")
        optimizer.step()
        time.sleep(0.02)
        while step == GATE and not (FOLDER / "go").exists():
            time.sleep(0.02)

everstep.main(train)
print("saved by rank", os.environ["RANK"])
"""


class SlurmJob:
    """The batch script with a training script, submitted from a folder."""

    def __init__(self, cluster: slurm.Cluster, folder: Path, nodes: int = 2, **variables: str) -> None:
        (folder / "train.py").write_text(TRAIN)
        self.cluster = cluster
        self.folder = folder
        settings = {"PYTHONPATH": str(ROOT), "EVERSTEP_LAUNCH_STATE_DIR": str(folder)}
        settings["LAUNCHER"] = f"{sys.executable} -m everstep_trainer.launch --hang-threshold-s 120"
        command = ["--nodes", str(nodes), str(SCRIPT), "train.py"]
        self.number = cluster.submit(command, folder, **settings, **variables)

    @property
    def output(self) -> str:
        path = self.folder / f"everstep-{self.number}.out"
        return path.read_text() if path.exists() else "(no output)"

    def eventually(self, condition: Callable[[], object], expected: str, every_s: float = 0.05) -> None:
        deadline = time.perf_counter() + DEADLINE_S
        while not condition():
            assert time.perf_counter() < deadline, f"never: {expected}\n{self.output}\n{self.cluster.logs()}"
            time.sleep(every_s)

    def rows(self) -> list[tuple[int, int, int]]:
        """(rank, step, pid) of every step that any rank made."""
        return [(rank, step, pid) for rank, step, pid in step_log.rows(self.folder)]

    def launcher_of(self, pid: int) -> int:
        """The launcher above a rank's process."""
        while b"everstep_trainer.launch" not in command_line(pid).split(b"\0"):
            pid = state_and_parent(pid)[1]
            assert pid > 1, f"no launcher is above it:\n{self.rows()[-5:]}\n{self.output}"
        return pid

    def has_reached(self, wanted: int) -> bool:
        return {rank for rank, step, _ in self.rows() if step >= wanted} == {0, 1}

    def close(self) -> None:
        """Ends the job if it runs, and waits until Slurm has its nodes back."""
        self.cluster.cancel(self.number, "--quiet")
        self.cluster.wait_for("IDLE")

    def has_restarted(self) -> bool:
        """Whether Slurm has started the requeued job again, which it would put off by two minutes."""
        self.cluster.scontrol("update", f"JobId={self.number}", "StartTime=now")
        return "Restarts=1" in self.cluster.scontrol("show", "job", self.number) and self.state == "RUNNING"

    @property
    def state(self) -> str:
        return self.cluster.job_state(self.number)

    def wait_for_end(self) -> str:
        """The job's last state, once Slurm has its nodes back."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "")
        self.eventually(lambda: self.state not in running, "the job's end", slurm.POLL_S)
        self.cluster.wait_for("IDLE")
        return self.state


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    if why := slurm.missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ev-") as name, slurm.cluster(Path(name), ("n1", "n2", "n3")) as made:
        yield made


@pytest.fixture
def job(cluster: slurm.Cluster, short_path: Path) -> Iterator[SlurmJob]:
    with contextlib.closing(SlurmJob(cluster, short_path)) as made:
        yield made


KILLED_ONCE = """\
#!/bin/sh
echo "$@" >> "tries-$SLURM_NODEID"
[ "$(wc -l < "tries-$SLURM_NODEID")" != 1 ] || kill -KILL $$
echo "ends in order"
"""


def test_killed_launcher_is_started_again(cluster: slurm.Cluster, short_path: Path) -> None:
    """That it finds its checkpoints then is in test_launch_private.py, and with Slurm among the nightly tests."""
    launcher = short_path / "launcher"
    launcher.write_text(KILLED_ONCE)
    launcher.chmod(0o700)
    number = cluster.submit(["--nodes", "1", str(SCRIPT), "train.py", "--lr", "1"], short_path, LAUNCHER=str(launcher))
    until(lambda: cluster.job_state(number) in ("COMPLETED", "FAILED"), "the job's end", DEADLINE_S)
    assert cluster.job_state(number) == "COMPLETED"
    first, second = (short_path / "tries-0").read_text().splitlines()
    assert first == second
    assert first.endswith(" train.py --lr 1")
    assert "ends in order" in (short_path / f"everstep-{number}.out").read_text()


def test_batch_script_trains_on_two_nodes_through_a_kill(job: SlurmJob) -> None:
    job.eventually(lambda: job.has_reached(20), "step 20")
    secret = job.folder / f".everstep-{job.number}" / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    job.cluster.cancel(job.number, "--signal=USR1")
    handled = {"usr1-0", "usr1-1"}
    job.eventually(lambda: handled <= {path.name for path in job.folder.glob("usr1-*")}, "the handlers of SIGUSR1")
    victim = next(pid for rank, _, pid in job.rows() if rank == 1)
    os.kill(victim, signal.SIGKILL)
    job.eventually(lambda: "generation 2" in job.output, "a generation with the replacement")
    assert "restarting" not in job.output, "no process of a launcher ended by SIGUSR1"
    (job.folder / "go").touch()
    assert job.wait_for_end() == "COMPLETED", job.output
    assert {step for rank, step, _ in job.rows() if rank == 1} == set(range(1, 41))
    assert {pid for rank, _, pid in job.rows() if rank == 1} > {victim}
    assert "saved by rank 0" in job.output
    assert secret.name not in {path.name for path in job.folder.rglob("*")}


@pytest.mark.nightly
def test_batch_job_continues_after_its_launcher_was_killed(job: SlurmJob) -> None:
    job.eventually(lambda: job.has_reached(20), "step 20")
    os.kill(job.launcher_of(next(pid for rank, _, pid in job.rows() if rank == 0)), signal.SIGKILL)
    job.eventually(lambda: "continuing with the checkpoints" in job.output, "another launcher on that node")
    (job.folder / "go").touch()
    assert job.wait_for_end() == "COMPLETED", job.output
    assert {step for rank, step, _ in job.rows() if rank == 0} == set(range(1, 41))


@pytest.mark.nightly
def test_spare_replaces_a_node_whose_task_died(cluster: slurm.Cluster, short_path: Path) -> None:
    with contextlib.closing(
        SlurmJob(cluster, short_path, nodes=3, SPARES="1", EVERSTEP_LAUNCH_VAULT_LINGER_S="1")
    ) as job:
        job.eventually(lambda: job.has_reached(20), "step 20")
        launchers = {job.launcher_of(pid) for _, _, pid in job.rows()}
        assert len(launchers) == 2, "the third node waits"
        victim = next(pid for pid in launchers if b"SLURM_NODEID=0" not in environment_of(pid))
        task = state_and_parent(victim)[1]
        assert b"bash\0-c\0" in command_line(task)
        os.kill(task, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        job.eventually(lambda: "generation 2, 2 ranks" in job.output, "a generation with the spare")
        (job.folder / "go").touch()
        assert job.wait_for_end() == "COMPLETED", job.output
        assert {step for rank, step, _ in job.rows() if rank == 1} == set(range(1, 41))
        left = [Path(f"/dev/shm/everstep-{os.getuid()}") / path.name for path in short_path.glob("n?/run-*")]
        job.eventually(lambda: not any(path.exists() for path in left), "the end of the lost node's vault")


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.nightly
def test_requeued_job_starts_from_its_checkpoints(cluster: slurm.Cluster, short_path: Path) -> None:
    variables = {"CHECKPOINTS": str(short_path / "stored"), "EVERSTEP_LAUNCH_SPILL_EVERY": "5", "GATE": "150"}
    with contextlib.closing(SlurmJob(cluster, short_path, **variables)) as job:  # type: ignore[arg-type]
        job.eventually(lambda: list(short_path.glob("stored/everstep-*/step-*/.metadata")), "a checkpoint on storage")
        before = len(job.rows())
        cluster.scontrol("requeue", job.number)
        (short_path / "go").touch()
        job.eventually(job.has_restarted, "the second start")
        assert job.wait_for_end() == "COMPLETED", job.output
    steps = [step for rank, step, _ in job.rows()[before:] if rank == 0]
    assert steps[-1] == 170
    assert 1 not in steps, "the second start began with the stored step"


@pytest.mark.nightly
def test_cancelled_batch_job_ends_in_order(job: SlurmJob) -> None:
    job.eventually(lambda: job.has_reached(20), "step 20")
    pids = {pid for _, _, pid in job.rows()}
    job.cluster.cancel(job.number)
    assert job.wait_for_end() == "CANCELLED", job.output
    assert not any(map(is_running, pids))
    assert {path.name for path in job.folder.glob("n?/*")} == {".lock", "logs"}, "each launcher removed its directory"


def test_more_spares_than_nodes_are_refused(cluster: slurm.Cluster, short_path: Path) -> None:
    number = cluster.submit(["--nodes", "1", str(SCRIPT), "train.py"], short_path, SPARES="1")
    until(lambda: cluster.job_state(number) == "FAILED", "the job's refusal", DEADLINE_S)
    output = (short_path / f"everstep-{number}.out").read_text()
    assert output == "everstep.sbatch: SPARES=1 leaves none of the 1 nodes to train on: ask for more with --nodes\n"
