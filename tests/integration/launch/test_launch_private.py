"""The launcher alone on a machine: its own controller and agent, a real training function, real failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.cli.runs import ListedRun
from everstep.receipts.receipt_files import stored_receipts
from tests.integration import step_log
from tests.support.processes.launcher import ROOT, LauncherProcess, launched
from tests.support.processes.process_table import command_line, is_running

pytestmark = pytest.mark.slow
PATIENT = ("--hang-threshold-s", "120")
"""For ranks that wait for a test, or for a busy machine."""

TRAIN = """
import os, pathlib, time, torch
import everstep

STEPS = pathlib.Path(__file__).parent / "steps"

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=60):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).pow(2).sum()
        run.report(loss=loss)
        loss.backward()
        with STEPS.open("a") as file:  # before it counts as made: who dies in between makes it again
            file.write(f"{os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {step} {os.getpid()}\\n")
        optimizer.step()
        time.sleep(0.02)

everstep.main(train)
os.write(1, f"saved by rank {os.environ['RANK']}{chr(10)}".encode())
"""


def gated(*gates: int) -> str:
    """``TRAIN``, whose ranks wait at each of these steps until a file named after the step is there."""
    wait = "def wait_at(step):\n    while not (STEPS.parent / f'go-{step}').exists():\n        time.sleep(0.02)\n\n"
    gate = f"wait_at(step) if step in {set(gates)} else time.sleep(0.02)"
    return TRAIN.replace("time.sleep(0.02)", gate).replace("def train(", wait + "def train(")


class Run:
    """A launcher with private services, and what its ranks wrote down."""

    def __init__(self, directory: Path, launcher: LauncherProcess, state: Path | None = None) -> None:
        self.directory = directory
        self.launcher = launcher
        self.state = state or directory / "state"

    def lines(self) -> list[tuple[int, int, int, int]]:
        """(rank, restart count, step, pid) of every step that any rank made."""
        return [(rank, restarts, step, pid) for rank, restarts, step, pid in step_log.rows(self.directory)]

    def pid_at(self, rank: int, step: int) -> int:
        """The process of ``rank`` once it has passed ``step``."""

        def there() -> int | None:
            return next((pid for r, _, s, pid in self.lines() if r == rank and s >= step), None)

        return self.launcher.eventually(there, f"rank {rank} at step {step}")

    def segments(self) -> list[Path]:
        """Segment directories in shared memory of this test's services."""
        runs = {path.name for path in self.state.glob("run-*")}
        return [path for path in Path(f"/dev/shm/everstep-{os.getuid()}").glob("run-*") if path.name in runs]


def agents_of(launcher: LauncherProcess) -> list[int]:
    """Return the processes of the launcher's private agent, without the vault."""
    return [pid for pid in launcher.descendants() if b"everstep_agent.main" in command_line(pid)]


def connections(directory: Path, name: str) -> int:
    """How many connections the listener at the unix socket ``name`` below ``directory`` has accepted and still has."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepted = [row[7] for row in rows if len(row) == 8 and row[5] == "03"]
    return sum(path.startswith(str(directory)) and path.endswith(f"/{name}") for path in accepted)


@pytest.fixture
def run(short_path: Path) -> Iterator[Run]:
    (short_path / "train.py").write_text(TRAIN)
    argv = ["--nproc-per-node", "2", "--standby-delay-s", "0.1", *PATIENT]
    argv += ["--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv) as launcher:
        yield Run(short_path, launcher)


def test_killed_rank_is_replaced_and_the_run_summarized(short_path: Path) -> None:
    """``everstep status`` and ``runs`` find the private controller; what failures cost stays in a receipt."""
    (short_path / "train.py").write_text(gated(60))
    argv = ["--nproc-per-node", "2", "--standby-delay-s", "0.1", *PATIENT, "--progress-interval-s", "0.1", "train.py"]
    with launched(short_path, *argv) as launcher:
        run = Run(short_path, launcher, short_path / "state" / "everstep")
        victim = run.pid_at(rank=1, step=20)
        services, segments = launcher.descendants(), run.segments()
        os.kill(victim, signal.SIGKILL)
        run.pid_at(rank=0, step=60)
        launcher.eventually(lambda: "everstep-launch: step 59/60 (98 %), " in launcher.err, "its progress")
        environment = {**os.environ, "XDG_STATE_HOME": str(short_path / "state")}
        for name in ("EVERSTEP_CONTROLLER", "EVERSTEP_TOKEN_FILE"):
            environment.pop(name, None)
        asked = {
            name: subprocess.Popen(
                [sys.executable, "-m", "everstep.cli.main", *name.split()],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("status", "runs --json", "open")
        }
        outputs = {name: process.communicate(timeout=120)[0] for name, process in asked.items()}
        (short_path / "go-60").touch()
        assert launcher.wait() == 0, launcher.err
    lines = run.lines()
    assert {pid for rank, _, _, pid in lines if rank == 1} > {victim}
    assert {step for rank, _, step, _ in lines if rank == 0} == set(range(1, 61))
    assert {restarts for _, restarts, _, _ in lines} == {0, 1}
    assert sorted(launcher.out.splitlines()) == ["saved by rank 0", "saved by rank 1"]
    assert segments
    assert not any(map(is_running, services))
    assert not any(path.exists() for path in segments)
    assert {path.name for path in run.state.iterdir()} == {".lock", "logs", "cache", "output", "receipts"}
    assert "1 healthy" in outputs["status"]
    assert "train-" in outputs["status"]
    (listed,) = msgspec.json.decode(outputs["runs --json"], type=list[ListedRun])
    assert listed.receipt is not None
    assert (listed.number, listed.receipt.result, listed.receipt.recovery_count) == (0, "running", 1)
    assert listed.receipt.until_step == 60
    assert len(re.findall(r"to watch: everstep open train-\w+\n", launcher.err)) == 1
    assert "operator%3A" not in launcher.err  # a batch log is read by others
    assert re.fullmatch(
        r"http://127\.0\.0\.1:\d+/#token=operator%3Alauncher%3A\w+&to=%2Fjob%2Ftrain-\w+\n", outputs["open"]
    )
    (line,) = re.findall(r"job train-\w+ finished at step 60: 1 recovery, ([0-9.]+) s lost", launcher.err)
    assert float(line) > 0
    (recovery,) = re.findall(r"generation 2: ([0-9.]+) s, rank_lost: ", launcher.err)
    assert 0 < float(recovery) <= float(line)  # the steps computed again are lost besides
    (stored,) = stored_receipts(run.state)
    assert f"receipt: {stored.page}" in launcher.err
    receipt = stored.receipt
    assert (receipt.result, receipt.steps, receipt.until_step, receipt.ranks) == ("finished", 60, 60, 2)
    assert receipt.loss is not None
    assert receipt.costs.lost_s >= float(line) - 0.01
    assert receipt.costs.saved_rank_s > 100
    (recovery,) = receipt.recoveries
    assert set(recovery.phases_s) >= {"rendezvous", "restore", "first_step"}
    assert receipt.job in stored.page.read_text()


@pytest.mark.promise("clean-exit")
def test_ctrl_c_leaves_no_process_no_socket_and_no_segment(run: Run) -> None:
    run.pid_at(rank=0, step=5)
    services, segments = run.launcher.descendants(), run.segments()
    os.killpg(run.launcher.pid, signal.SIGINT)
    assert run.launcher.wait() == 130
    assert [entry.receipt.result for entry in stored_receipts(run.state)] == ["interrupted"]
    assert not any(map(is_running, services))
    assert not any(path.exists() for path in segments)
    assert not list((run.directory / "state").glob("run-*"))


EMERGENCY = """
import pathlib, signal, time, torch, torch.distributed as dist
import everstep

HERE = pathlib.Path(__file__).parent
asked = []

def train(run):
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100000):
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
        (HERE / f"at-{run.rank}").write_text(str(step))
        stop = torch.tensor(float(bool(asked)))
        dist.all_reduce(stop)
        if stop:
            if run.rank == 0:
                time.sleep(1.5)  # longer than a silent rank is left alone
                (HERE / "emergency").write_text(str(step))
            break
        time.sleep(0.02)
    (HERE / f"left-{run.rank}").write_text(f"{step} {run.generation}")

everstep.main(train)
"""


@pytest.mark.promise("orderly-stop")
def test_sigterm_lets_ranks_save_and_writes_the_newest_version(short_path: Path) -> None:
    (short_path / "train.py").write_text(EMERGENCY)
    argv = ["--nproc-per-node", "2", "--spill-to", "store", "--job", "calm", "--state-dir", str(short_path / "state")]
    with launched(short_path, *argv, "train.py") as launcher:

        def is_beyond_10() -> bool:
            return (short_path / "at-1").exists() and int((short_path / "at-1").read_text() or 0) > 10

        launcher.eventually(is_beyond_10, "step 10")
        launcher.process.terminate()
        assert launcher.wait() == 128 + signal.SIGTERM
    saved = (short_path / "emergency").read_text()
    assert {(short_path / f"left-{rank}").read_text() for rank in (0, 1)} == {f"{saved} 1"}
    folder = max((short_path / "store" / "calm").iterdir())  # on a slow machine an earlier version is there, too
    assert (folder / ".metadata").exists()
    lines = launcher.err.splitlines()
    assert any(line.endswith(f"is saved in {folder}; the same command continues there") for line in lines)
    assert lines[-1].startswith("everstep-launch: receipt: ")
    assert "killing" not in launcher.err
    assert [entry.receipt.result for entry in stored_receipts(short_path / "state")] == ["interrupted"]


@pytest.mark.promise("resumed-by-default")
def test_same_command_continues_from_storage(short_path: Path) -> None:
    script = TRAIN.replace("until=60", "until=int(os.environ['UNTIL'])")
    (short_path / "train.py").write_text(script)
    argv = ["--nproc-per-node", "2", "--spill-to", "store", "--state-dir", str(short_path / "state"), *PATIENT]
    for until in (60, 60, 90):
        with launched(short_path, *argv, "train.py", UNTIL=str(until)) as launcher:
            assert launcher.wait() == 0, launcher.err
            made = {step for rank, _, step, _ in Run(short_path, launcher).lines() if rank == 0}
        assert made == set(range(1, until + 1))
    first = re.search(r"continues from step (\d+) in (\S+),", launcher.err)
    assert first is not None, launcher.err
    (job,) = (short_path / "store").iterdir()
    assert Path(first[2]).parent == job
    steps = {int(folder.name[5:13]) for folder in job.iterdir()}
    assert max(steps) > int(first[1]) > 0
    assert len([step for rank, _, step, _ in Run(short_path, launcher).lines() if rank == 0]) < 60 + 60 + 90


@pytest.mark.promise("resumed-by-default")
def test_fresh_run_starts_anew_and_removes_nothing(short_path: Path) -> None:
    (short_path / "train.py").write_text(TRAIN)
    argv = ["--nproc-per-node", "2", "--spill-to", "store", "--job", "llama", *PATIENT]
    argv += ["--state-dir", str(short_path / "state")]
    with launched(short_path, *argv, "train.py") as launcher:
        assert launcher.wait() == 0, launcher.err
    stored = {path: path.read_bytes() for path in (short_path / "store").rglob("*") if path.is_file()}
    assert any(path.name == ".metadata" for path in stored)
    with launched(short_path, *argv, "--fresh", "train.py") as launcher:
        assert launcher.wait() == 0, launcher.err
        steps = [step for rank, _, step, _ in Run(short_path, launcher).lines() if rank == 0]
    assert steps == 2 * list(range(1, 61))
    assert "starts anew" in launcher.err
    assert {path: path.read_bytes() for path in stored} == stored
    assert {path.name for path in (short_path / "store").iterdir()} == {"llama", "llama~2"}
    assert list((short_path / "store" / "llama~2").glob("*/.metadata"))


@pytest.mark.promise("clean-exit")
@pytest.mark.parametrize("vault_too", [False, True])
def test_restarted_launcher_restores_from_vault_memory(short_path: Path, vault_too: bool) -> None:
    """Also where the whole control group was killed: another vault is started over the slots."""
    (short_path / "train.py").write_text(TRAIN)
    argv = ["--nproc-per-node", "2", "--job", "again", "--vault-linger-s", "60", *PATIENT]
    argv += ["--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv) as first:
        before = Run(short_path, first)
        before.pid_at(rank=0, step=20)
        below = first.descendants()
        (vault,) = [pid for pid in below if b"everstep_agent.vault.process" in command_line(pid)]
        first.process.kill()
        if vault_too:
            os.kill(vault, signal.SIGKILL)
        first.eventually(
            lambda: not any(is_running(pid) for pid in below if pid != vault), "the end of all but the vault"
        )
    with launched(short_path, *argv) as second:
        after = Run(short_path, second)
        (segments,) = after.segments()
        assert second.wait() == 0, second.err
    assert "continuing with the checkpoints that the killed launcher of job again left" in second.err
    made = [step for rank, _, step, _ in after.lines() if rank == 0]
    assert sorted(set(made)) == list(range(1, 61))
    assert len(made) <= 61, "no step that was finished was made again, but for the one in which it was killed"
    second.eventually(lambda: not is_running(vault), "the end of the vault")
    assert not segments.exists()
    assert not list((short_path / "state").glob("run-*"))


@pytest.mark.promise("clean-exit")
@pytest.mark.parametrize("flags", [(), ("--job", "gone", "--vault-linger-s", "0.5")])
def test_killed_launcher_ends_its_services_and_frees_memory(short_path: Path, flags: tuple[str, ...]) -> None:
    (short_path / "train.py").write_text(TRAIN)
    argv = [*flags, "--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv) as launcher:
        run = Run(short_path, launcher)
        run.pid_at(rank=0, step=5)
        services, segments = launcher.descendants(), run.segments()
        assert segments
        launcher.process.kill()
        launcher.eventually(lambda: not any(map(is_running, services)), "the end of all children")
        launcher.eventually(lambda: not any(path.exists() for path in segments), "the end of all segments")


def test_restarted_private_agent_reuses_its_vault(run: Run) -> None:
    run.pid_at(rank=0, step=5)
    (agent,) = agents_of(run.launcher)
    (vault,) = [pid for pid in run.launcher.descendants() if b"everstep_agent.vault.process" in command_line(pid)]
    os.kill(agent, signal.SIGKILL)
    run.launcher.eventually(lambda: "restarting it" in run.launcher.err, "another agent")
    victim = run.pid_at(rank=1, step=max(step for _, _, step, _ in run.lines()))
    os.kill(victim, signal.SIGKILL)
    assert run.launcher.wait() == 0, run.launcher.err
    assert "the private agent ended with status -9; restarting it" in run.launcher.err
    assert {step for rank, _, step, _ in run.lines() if rank == 0} == set(range(1, 61))
    made = [step for rank, _, step, _ in run.lines() if rank == 0]
    assert len(made) <= 61, "the vault that was there before still has what was finished"
    assert not is_running(vault)


@pytest.mark.promise("lost-rank-replaced")
def test_job_resumes_after_launcher_joins_late(short_path: Path) -> None:
    """The agent's launcher stands still when the next agent starts, and all ranks end before it has joined that one."""
    (short_path / "train.py").write_text(gated(20, 50))
    argv = ["--nproc-per-node", "2", *PATIENT, "--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv) as launcher:
        run = Run(short_path, launcher)
        before = run.pid_at(rank=0, step=20)
        (agent,) = agents_of(launcher)
        os.kill(agent, signal.SIGKILL)
        launcher.eventually(lambda: set(agents_of(launcher)) - {agent}, "another agent")
        launcher.process.send_signal(signal.SIGSTOP)
        try:
            launcher.eventually(lambda: connections(run.directory, "agent.sock") >= 2, "both ranks at the next agent")
            (short_path / "go-20").touch()
            run.pid_at(rank=1, step=50)  # each has ticked by now
            os.kill(launcher.child_named("everstep-forks"), signal.SIGKILL)
            launcher.eventually(lambda: not is_running(before), "the end of the ranks")
            launcher.eventually(lambda: connections(run.directory, "agent.sock") == 0, "the end of their connections")
            (short_path / "go-50").touch()
        finally:
            launcher.process.send_signal(signal.SIGCONT)
        assert launcher.wait() == 0, launcher.err
        assert {step for rank, _, step, _ in run.lines() if rank == 0} == set(range(1, 61))


EARLY = """
import sys, time, torch
import everstep

def train(run):
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100000):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
        if step == 6 and (run.rank == 1 or sys.argv[1] == "all"):
            break
    if run.rank == 0:
        time.sleep(2.0)  # evaluates or saves: longer than a hang may last

everstep.main(train)
"""


@pytest.mark.promise("uneven-steps")
def test_rank_stopping_early_alone_fails_the_job(short_path: Path) -> None:
    (short_path / "train.py").write_text(EARLY)
    argv = ["--nproc-per-node", "3", "--state-dir", str(short_path / "state"), "train.py", "one"]
    with launched(short_path, *argv) as launcher:
        assert launcher.wait() == 1, launcher.err
    (stored,) = stored_receipts(short_path / "state")
    assert (stored.receipt.result, stored.receipt.until_step) == ("failed", 100000)
    assert "rank 1 returned" in stored.receipt.sentence
    others = "(ranks 0 and 2|rank 0|rank 2) began step 7"  # as far as was reported before the end
    assert re.search(f"rank 1 returned from the training function after step 6, but {others}", launcher.err), (
        launcher.err
    )
    assert "ended with SIGKILL" not in launcher.err


@pytest.mark.promise("uneven-steps")
def test_ranks_stopping_early_together_finish_the_job(short_path: Path) -> None:
    (short_path / "train.py").write_text(EARLY)
    argv = ["--nproc-per-node", "3", "--state-dir", str(short_path / "state"), "train.py", "all"]
    with launched(short_path, *argv) as launcher:
        assert launcher.wait() == 0, launcher.err


@pytest.mark.promise("training-independent")
def test_dead_private_controller_restarts_for_next_failure(run: Run) -> None:
    run.pid_at(rank=0, step=5)
    (controller,) = [pid for pid in run.launcher.descendants() if b"everstep_controller.main" in command_line(pid)]
    os.kill(controller, signal.SIGKILL)
    victim = run.pid_at(rank=0, step=15)
    os.kill(victim, signal.SIGKILL)
    assert run.launcher.wait() == 0, run.launcher.err
    assert "the private controller ended with status -9; restarting it" in run.launcher.err
    assert {step for rank, _, step, _ in run.lines() if rank == 1} == set(range(1, 61))


STOPPED = """
[[xid]]
xid = 43
severity = "critical"
action = "restart_rank"
mode = "enforce"
source = "this test: whatever runs on the GPU has to be started again"
"""


def test_rank_on_stopped_gpu_is_restarted(short_path: Path) -> None:
    (short_path / "train.py").write_text(gated(20))
    rules, control = short_path / "site.toml", short_path / "control.json"
    rules.write_text(STOPPED)
    argv = ["--nproc-per-node", "2", "--standby-delay-s", "0.1", *PATIENT]
    argv += ["--state-dir", str(short_path / "state"), "train.py"]
    site = {
        "EVERSTEP_AGENT_SITE_POLICY": str(rules),
        "EVERSTEP_AGENT_VIRTUAL": "default:2",
        "EVERSTEP_AGENT_VIRTUAL_CONTROL": str(control),
    }
    with launched(short_path, *argv, **site) as launcher:  # type: ignore[arg-type]
        run = Run(short_path, launcher)
        victim = run.pid_at(rank=1, step=10)
        (short_path / "new.json").write_text('{"gpus": {"1": {"xid": 43}}}')
        (short_path / "new.json").rename(control)
        launcher.eventually(lambda: "is restarted" in launcher.err, "the order to start it again")
        launcher.eventually(lambda: not is_running(victim), "the end of its process")
        (short_path / "go-20").touch()
        assert launcher.wait() == 0, launcher.err
    lines = run.lines()
    assert len({pid for rank, _, _, pid in lines if rank == 1} - {victim}) == 1
    assert len({pid for rank, _, _, pid in lines if rank == 0}) == 1
    assert {step for rank, _, step, _ in lines if rank == 0} == set(range(1, 61))
    assert "rank 1 of train" in launcher.err
    assert "is restarted" in launcher.err


def test_process_group_of_the_script_is_replaced(short_path: Path) -> None:
    """A group has fixed members, and a generation has its own: the script's is given up, and said so."""
    (short_path / "train.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nEARLY = dist.group.WORLD\n"
        + TRAIN.replace("def train(run):", "def train(run):\n    assert dist.group.WORLD is not EARLY").replace(
            "until=60", "until=3"
        )
    )
    argv = ["--nproc-per-node", "2", "--standbys", "0", "--state-dir", str(short_path / "state"), "train.py"]
    with launched(short_path, *argv, GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert "init_process_group" in launcher.err
    assert sorted(launcher.out.splitlines()) == ["saved by rank 0", "saved by rank 1"]
