"""Launchers of two nodes that meet at an endpoint, with no agent and no controller standing."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.peers.run import free_port
from tests.integration import step_log
from tests.support.processes.launcher import LauncherProcess, launched
from tests.support.processes.process_table import is_running

pytestmark = pytest.mark.slow

TRAIN = """
import os, pathlib, time, torch
import everstep

FOLDER = pathlib.Path(__file__).parent
RESTARTS = "TORCHELASTIC_RESTART_COUNT"

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=60):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        with (FOLDER / "steps").open("a") as file:
            file.write(f"{os.environ['RANK']} {os.environ[RESTARTS]} {step} {os.getpid()}\\n")
        optimizer.step()
        time.sleep(0.02)
        while step in (20, 40) and not (FOLDER / f"go-{step}").exists():
            time.sleep(0.02)

everstep.main(train)
"""


class TwoNodes:
    """A folder with a script, and launchers of two nodes on loopback."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(TRAIN)
        self.folder = folder
        self.endpoint = f"127.0.0.1:{free_port()}"

    def launch(self, node: int, *flags: str, namespace: str = "") -> AbstractContextManager[LauncherProcess]:
        directory = self.folder / f"node{node}"
        directory.mkdir(exist_ok=True)
        argv = ["--nnodes", "2", "--rdzv-endpoint", self.endpoint, "--job", "two", "--hang-threshold-s", "120"]
        argv += ["--state-dir", str(self.folder / "state"), "--standby-delay-s", "0.1", *flags]
        return launched(directory, *argv, str(self.folder / "train.py"), namespace=namespace)

    @contextmanager
    def launch_first(self, *flags: str) -> Iterator[LauncherProcess]:
        """The launcher of node 0, once it is the first node; else the other could have the endpoint before it."""
        with self.launch(0, *flags) as first:
            first.eventually(lambda: "this is the first node of job two" in first.err, "the first node")
            yield first

    def rows(self) -> list[tuple[int, int, int, int]]:
        """(rank, restart count, step, pid) of every step that any rank made."""
        return [(rank, restarts, step, pid) for rank, restarts, step, pid in step_log.rows(self.folder)]

    def pid_at(self, launcher: LauncherProcess, rank: int, step: int) -> int:
        """The newest process of ``rank`` once it has passed ``step``."""

        def there() -> int | None:
            return next((pid for r, _, s, pid in reversed(self.rows()) if r == rank and s >= step), None)

        return launcher.eventually(there, f"rank {rank} at step {step}")

    def go(self, step: int) -> None:
        (self.folder / f"go-{step}").touch()

    def segments(self) -> list[Path]:
        runs = {path.name for path in (self.folder / "state").glob("*/run-*")}
        return [path for path in Path(f"/dev/shm/everstep-{os.getuid()}").glob("run-*") if path.name in runs]


@pytest.fixture
def nodes(short_path: Path) -> TwoNodes:
    return TwoNodes(short_path)


def test_two_launchers_survive_a_rank_and_a_node(nodes: TwoNodes) -> None:
    with nodes.launch_first() as first, ExitStack() as stack:
        second = stack.enter_context(nodes.launch(1))
        pids = [nodes.pid_at(second, rank, step=20) for rank in (0, 1)]
        of_second = 0 if pids[0] in second.descendants() else 1
        os.kill(pids[1 - of_second], signal.SIGKILL)
        second.eventually(lambda: "generation 2" in second.err, "a generation with the replacement")
        nodes.go(20)
        victim = nodes.pid_at(first, of_second, step=40)
        below = second.descendants()
        assert victim in below
        second.process.kill()
        first.eventually(lambda: not is_running(victim), "the end of the second node's ranks")
        again = stack.enter_context(nodes.launch(1))
        again.eventually(lambda: "generation" in again.err, "the second node's return")
        segments = nodes.segments()
        assert segments
        nodes.go(40)
        assert again.wait() == 0, again.err
        assert first.wait() == 0, first.err
    assert "continuing with the checkpoints that the killed launcher of job two left" in again.err
    assert "this is the first node of job two: its controller listens at https://" in first.err
    assert {step for rank, _, step, _ in nodes.rows() if rank == 0} == set(range(1, 61))
    assert {step for rank, _, step, _ in nodes.rows() if rank == 1} == set(range(1, 61))
    assert not any(path.exists() for path in segments)
    assert not list((nodes.folder / "state").glob("*/run-*"))


@pytest.mark.nightly
def test_first_node_ending_in_order_ends_the_job_for_all(nodes: TwoNodes) -> None:
    with nodes.launch_first() as first, nodes.launch(1) as second:
        nodes.pid_at(second, rank=1, step=5)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 128 + signal.SIGTERM
        assert second.wait() == 1
    assert "the first node's launcher ended: ended by SIGTERM" in second.err


@pytest.mark.nightly
def test_first_launcher_that_comes_back_continues(nodes: TwoNodes) -> None:
    with nodes.launch_first() as first, nodes.launch(1) as second, ExitStack() as stack:
        nodes.pid_at(second, rank=1, step=20)
        below = [*first.descendants()]
        first.process.kill()
        nodes.go(20)
        nodes.go(40)
        second.eventually(lambda: sum(map(is_running, below)) <= 1, "the end of all below the first but its vault")
        again = stack.enter_context(nodes.launch(0))
        assert again.wait() == 0, again.err
        assert second.wait() == 0, second.err
    assert "continuing with the checkpoints" in again.err


@pytest.mark.nightly
def test_loss_of_the_first_node_ends_the_job_with_a_sentence(nodes: TwoNodes) -> None:
    timeout = ("--first-node-timeout-s", "3", "--vault-linger-s", "0.5")
    with nodes.launch_first(*timeout) as first, nodes.launch(1, *timeout) as second:
        nodes.pid_at(second, rank=1, step=5)
        first.process.kill()
        assert second.wait() == 1
    assert "where the job's controller ran, has not answered for 3 s: the job ends" in second.err


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable. Skips where there can be none."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = f"ev{os.getpid()}-1", f"ev{os.getpid()}-2"
    with ExitStack() as stack:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
                pytest.skip("network namespaces are not allowed here")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ends = ["ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns"]
        subprocess.run([*ends, names[1]], check=True)
        for number, name in enumerate(names, 1):
            for words in ("link set lo up", f"addr add 10.77.0.{number}/24 dev cable", "link set cable up"):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield names


def test_nodes_on_different_addresses_share_a_secret_file(nodes: TwoNodes, namespaces: tuple[str, str]) -> None:
    """As two machines: the hosts file gives the host's name loopback, and only the file proves who belongs together."""
    secret = nodes.folder / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    nodes.endpoint = "10.77.0.1:29400"
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                nodes.launch(n, "--job-secret-file", str(secret), "--node", f"n{n}", namespace=namespaces[n])
            )
            for n in (0, 1)
        )
        os.kill(nodes.pid_at(second, rank=1, step=20), signal.SIGKILL)
        nodes.go(20)
        nodes.go(40)
        assert first.wait() == 0, first.err
        assert second.wait() == 0, second.err
    assert "job two finished at step 60: 1 recovery" in first.err
    assert secret.read_text() not in first.err + second.err


TORCHRUN_SCRIPT = """
import os, pathlib, time
import torch, torch.distributed as dist

FOLDER = pathlib.Path(__file__).parent
dist.init_process_group("gloo")
rank, snapshot = dist.get_rank(), FOLDER / "snapshot.pt"
done = torch.load(snapshot) if snapshot.exists() else 0
for step in range(done + 1, 41):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    with (FOLDER / "steps").open("a") as file:
        file.write(f"{rank} {os.environ['TORCHELASTIC_RESTART_COUNT']} {step} {os.getpid()}\\n")
    if rank == 0:
        torch.save(step, FOLDER / "new.pt")
        os.replace(FOLDER / "new.pt", snapshot)
    while step == 20 and not (FOLDER / "go-20").exists():
        time.sleep(0.02)
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_torchrun_script_survives_a_lost_node(nodes: TwoNodes) -> None:
    """The scripts of the node that is left start again, alone, from their own checkpoint."""
    (nodes.folder / "train.py").write_text(TORCHRUN_SCRIPT)
    flags = ("--torchrun-script", "--max-restarts", "2", "--nnodes", "1:2", "--join-wait-s", "60")
    with nodes.launch_first(*flags) as first, nodes.launch(1, *flags) as second:
        pids = [nodes.pid_at(second, rank, step=20) for rank in (0, 1)]
        assert sum(pid in second.descendants() for pid in pids) == 1
        below = second.descendants()
        second.process.kill()
        second.eventually(lambda: not any(map(is_running, below)), "the end of the second node's processes")
        nodes.go(20)
        assert first.wait() == 0, first.err
    assert {rank for rank, restarts, _, _ in nodes.rows() if restarts} == {0}
    assert [step for _, restarts, step, _ in nodes.rows() if restarts][-1] == 40
