"""A real launcher with real workers, and a fake agent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.local import RankExited
from everstep.wire.v1.training import GenerationSpec, JobSpec, LauncherJoined, LauncherLeaving, RestoreRule
from tests.support.agents.fake_agent import FakeAgent, fake_agent
from tests.support.processes.launcher import ROOT, LauncherProcess, launched
from tests.support.processes.process_table import is_running

pytestmark = pytest.mark.slow

HOOKED = """
import os, pathlib, signal, sys
from everstep_trainer.launch.assignment import current_assignment, wait_for_local_rank

directory = pathlib.Path(sys.argv[1])
assignment = current_assignment()
local_rank = wait_for_local_rank()
assert os.environ["LOCAL_RANK"] == str(local_rank) == str(current_assignment().local_rank)
(directory / f"took-{local_rank}-{os.getpid()}").touch()
while not (directory / "finish").exists():
    signal.sigtimedwait((), 0.02)
(directory / f"finished-{local_rank}").touch()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with fake_agent(tmp_path / "agent.sock") as agent:
        yield agent


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(HOOKED)
    return path


def start(agent: FakeAgent, script: Path, *flags: str, **environment: str) -> AbstractContextManager[LauncherProcess]:
    argv = ["--agent-socket", str(agent.path), "--job", "j", "--nproc-per-node", "2", "--standby-delay-s", "0.05"]
    return launched(script.parent, *argv, *flags, str(script), str(script.parent), **environment)  # type: ignore[arg-type]


def holder(launcher: LauncherProcess, directory: Path, local_rank: int, *, not_in: tuple[int, ...] = ()) -> int:
    """The process that has taken ``local_rank``; wait for it."""

    def find_process() -> int | None:
        pids = (int(path.name.rpartition("-")[2]) for path in directory.glob(f"took-{local_rank}-*"))
        return next((pid for pid in pids if pid not in not_in), None)

    return launcher.eventually(find_process, f"a process for local rank {local_rank}")


def generation(store: str, number: int, nodes: tuple[str, ...] = ("n1",)) -> NewGeneration:
    spec = GenerationSpec(
        job="j",
        number=number,
        reason=GenerationReason.FORMED,
        sentence="for a test",
        trace="t1",
        seats=nodes,
        store=store,
        store_node=nodes[0],
        restore=RestoreRule(from_scratch=True),
        holders=(),
        replica_nodes={},
        secret="00",
        spec=JobSpec(job="j", nproc_per_node=2),
        issued_at=0.0,
    )
    return NewGeneration(spec=spec)


def test_standby_replaces_killed_worker_and_is_refilled(agent: FakeAgent, script: Path) -> None:
    with start(agent, script) as launcher:
        first = holder(launcher, script.parent, 1)
        standby = launcher.child_named("everstep-spare")
        os.kill(first, signal.SIGKILL)
        exited = agent.wait_for_message(RankExited)
        assert (exited.local_rank, exited.pid, exited.signal, exited.has_replacement) == (
            1,
            first,
            signal.SIGKILL,
            True,
        )
        assert holder(launcher, script.parent, 1, not_in=(first,)) == standby
        launcher.eventually(lambda: launcher.child_named("everstep-spare") != standby, "a new standby")
        assert holder(launcher, script.parent, 0) in launcher.descendants()


def test_launcher_forwards_signals_only_to_handling_ranks(agent: FakeAgent, script: Path) -> None:
    """Slurm's --signal=USR1@120 sends such a signal before a preemption."""
    note = "signal.signal(signal.SIGUSR1, lambda *_: (directory / f'noted-{local_rank}').touch())"
    script.write_text(HOOKED.replace("while not", f"if local_rank: {note}\nPATH.touch()\nwhile not"))
    script.write_text(script.read_text().replace("PATH", "(directory / f'ready-{local_rank}')"))
    with start(agent, script, "--standbys", "0") as launcher:
        for local_rank in (0, 1):
            launcher.eventually((script.parent / f"ready-{local_rank}").exists, "the rank to install its handler")
        descendants = launcher.descendants()

        def note_exists() -> bool:  # the launcher may notice a rank only after the rank's first lines
            os.killpg(launcher.pid, signal.SIGUSR1)
            return (script.parent / "noted-1").exists()

        launcher.eventually(note_exists, "the notice")
        launcher.process.send_signal(signal.SIGUSR2)
        launcher.eventually(lambda: "SIGUSR2 is ignored" in launcher.err, "the warning that no rank handles it")
        assert all(map(is_running, descendants))


def test_worker_ignoring_sigterm_is_killed_after_grace(agent: FakeAgent, script: Path) -> None:
    script.write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HOOKED)
    with start(agent, script, "--grace-s", "0.2") as launcher:
        holder(launcher, script.parent, 0)
        descendants = launcher.descendants()
        launcher.process.terminate()
        assert launcher.wait() == 128 + signal.SIGTERM
        assert not any(map(is_running, descendants))


def test_rank_asked_to_leave_saves_and_is_replaced(agent: FakeAgent, script: Path) -> None:
    """A rank of a drained node gets SIGTERM and a grace period; a rank that stays is killed after it."""
    save = (
        "import signal, sys\n"
        "def save(*_):\n"
        "    (directory / f'saved-{local_rank}').touch()\n"
        "    local_rank or sys.exit(0)\n"
    )
    ready = "signal.signal(signal.SIGTERM, save)\n(directory / f'ready-{local_rank}').touch()\nwhile not"
    script.write_text(save + HOOKED.replace("while not", ready))
    with start(agent, script, "--standbys", "0", "--grace-s", "0.2") as launcher:
        for local_rank in (0, 1):
            launcher.eventually((script.parent / f"ready-{local_rank}").exists, "a handler")
        pids = [holder(launcher, script.parent, local_rank) for local_rank in (0, 1)]
        for local_rank in (0, 1):
            order = KillRank(
                job="j", generation=1, rank=local_rank, local_rank=local_rank, reason="drained", has_grace=True
            )
            agent.launcher().send(order)
        for local_rank, pid in enumerate(pids):
            launcher.eventually((script.parent / f"saved-{local_rank}").exists, "its handler's call")
            holder(launcher, script.parent, local_rank, not_in=(pid,))


def test_second_ctrl_c_ends_launcher_at_once(agent: FakeAgent, script: Path) -> None:
    script.write_text("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HOOKED)
    with start(agent, script, "--grace-s", "3600") as launcher:
        holder(launcher, script.parent, 0)
        descendants = launcher.descendants()
        agent.wait_for_message(LauncherJoined)
        launcher.process.send_signal(signal.SIGINT)
        agent.wait_for_message(LauncherLeaving)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.wait() == 130
        launcher.eventually(lambda: not any(map(is_running, descendants)), "the kernel to end all child processes")


def test_script_runs_to_its_end_after_the_job_finishes(agent: FakeAgent, script: Path) -> None:
    with start(agent, script) as launcher:
        holder(launcher, script.parent, 0)
        holder(launcher, script.parent, 1)
        standby = launcher.child_named("everstep-spare")
        peer = agent.launcher()
        joined = agent.wait_for_message(LauncherJoined)
        peer.send(generation(joined.store, 1))
        peer.send(StopJob(job="j", ok=True, reason="finished"))
        launcher.eventually(lambda: not is_running(standby), "the end of the standby")
        assert launcher.process.poll() is None
        (script.parent / "finish").touch()
        assert launcher.wait() == 0
        assert {path.name for path in script.parent.glob("finished-*")} == {"finished-0", "finished-1"}


def test_a_failed_job_is_ended_with_its_reason(agent: FakeAgent, script: Path) -> None:
    with start(agent, script) as launcher:
        holder(launcher, script.parent, 0)
        agent.launcher().send(StopJob(job="j", ok=False, reason="the loss became NaN on rank 3"))
        assert launcher.wait() == 1
        assert "the loss became NaN on rank 3" in launcher.err


def test_the_launcher_joins_again_when_the_agent_comes_back(agent: FakeAgent, script: Path) -> None:
    with start(agent, script) as launcher:
        worker = holder(launcher, script.parent, 0)
        joined = agent.wait_for_message(LauncherJoined)
        assert joined.generation == 0
        agent.launcher().send(generation(joined.store, 4))
        launcher.eventually(lambda: "generation 4" in launcher.err, "generation 4")
        agent.stop()
        os.kill(worker, signal.SIGKILL)
        holder(launcher, script.parent, 0, not_in=(worker,))
        agent.start()
        again = agent.wait_for_message(LauncherJoined)
        assert (again.generation, again.launcher, again.store) == (4, joined.launcher, joined.store)
        assert agent.wait_for_message(RankExited).pid == worker


IMPORTED = """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent
(HERE / f"imports-{os.getpid()}").touch()
while (HERE / "held").exists():
    time.sleep(0.01)
"""


@pytest.mark.promise("fork-server")
def test_fork_server_is_replaced_from_its_zygote(agent: FakeAgent, script: Path) -> None:
    """The zygote imports everything once, and outlives the fork servers.

    A zygote that dies, even during its imports, is replaced together with its fork server.
    """
    (script.parent / "slow_import.py").write_text(IMPORTED)
    held = script.parent / "held"

    def imported() -> set[int]:
        return {int(path.name.rpartition("-")[2]) for path in script.parent.glob("imports-*")}

    flags, path = ("--max-restarts", "5", "--preload", "slow_import"), f"{ROOT}:{script.parent}"
    with start(agent, script, *flags, PYTHONPATH=path) as launcher:
        first = tuple(holder(launcher, script.parent, n) for n in range(2))
        zygote = launcher.child_named("everstep-zygote")
        os.kill(launcher.child_named("everstep-forks"), signal.SIGKILL)
        second = tuple(holder(launcher, script.parent, n, not_in=first) for n in range(2))
        assert imported() == {zygote}
        held.touch()
        os.kill(zygote, signal.SIGKILL)
        launcher.eventually(lambda: len(imported()) == 2, "another zygote, which imports")
        (importing,) = imported() - {zygote}
        os.kill(importing, signal.SIGKILL)
        held.unlink()
        third = [holder(launcher, script.parent, n, not_in=(*first, *second)) for n in range(2)]
        assert all(map(is_running, third))
        assert launcher.child_named("everstep-zygote") not in (zygote, importing)
        descendants = launcher.descendants()
    launcher.eventually(lambda: not any(map(is_running, descendants)), "the end of all")


def test_fork_server_that_cannot_import_ends_the_launcher(agent: FakeAgent, script: Path) -> None:
    (script.parent / "broken_import.py").write_text("raise RuntimeError('no such device')")
    with start(agent, script, "--preload", "broken_import", PYTHONPATH=f"{ROOT}:{script.parent}") as launcher:
        assert launcher.wait() == 1
        assert "no such device" in launcher.err
        assert "the fork server ended before it was ready" in launcher.err


def test_output_goes_to_files_and_tee_shows_the_rank(agent: FakeAgent, script: Path) -> None:
    script.write_text(HOOKED + "print('hello from', local_rank)\n")
    with start(agent, script, "--log-dir", str(script.parent / "logs"), "--tee", "3", "--standbys", "0") as launcher:
        holder(launcher, script.parent, 0)
        agent.launcher().send(generation(agent.wait_for_message(LauncherJoined).store, 1))
        agent.launcher().send(StopJob(job="j", ok=True, reason="finished"))
        launcher.eventually(lambda: "generation 1" in launcher.err, "generation 1")
        (script.parent / "finish").touch()
        assert launcher.wait() == 0
        assert "[rank 1]: hello from 1\n" in launcher.out
        assert (script.parent / "logs" / "j" / "worker-2.out").read_text() == "hello from 1\n"


def test_plain_script_gets_torchrun_environment(short_path: Path) -> None:
    """The current directory has modules named like imports of the launcher and the script; they must not be imported.

    PYTHONPATH has modules with former names of Everstep's packages.
    """
    for name in ("numpy", "torch", "xxhash", "own/agent", "own/controller", "own/trainer_hooks"):
        (module := short_path / f"{name}.py").parent.mkdir(exist_ok=True)
        module.write_text("raise SystemExit('shadowed')")
    script = short_path / "scripts" / "plain.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("NAME = 'beside the script'")
    script.write_text(
        "import os, sys, torch, torch.distributed as dist, beside\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(total)\n"
        "line = f'{dist.get_rank()} of {dist.get_world_size()}: {total.item()} {sys.argv[1:]} {beside.NAME}'\n"
        "os.write(1, f'{line} {__name__}{chr(10)}'.encode())\n"  # one write, so that no other output splits it
        "dist.destroy_process_group()\n"
    )
    argv = ["--nproc-per-node", "2", "--standbys", "0", "--state-dir", str(short_path / "state")]
    path = str(short_path / "own")
    with launched(short_path, *argv, "scripts/plain.py", "--x", warm=False, PYTHONPATH=path) as launcher:
        assert launcher.wait() == 0, launcher.err
        line_end = "of 2: 3.0 ['--x'] beside the script __main__"
        assert sorted(launcher.out.splitlines()) == [f"0 {line_end}", f"1 {line_end}"]
        assert "2 ranks, OMP_NUM_THREADS=1; to watch: everstep open plain-" in launcher.err


@pytest.mark.parametrize(
    ("utf8_mode", "state"), [("1", "zustände"), ("0", "state")], ids=["files in UTF-8", "files in ASCII"]
)
def test_names_with_umlauts_work_in_the_c_locale(short_path: Path, utf8_mode: str, state: str) -> None:
    """Python reads them as surrogates in the second case, which no message can hold."""
    (short_path / "größe.py").write_text("import os, sys; os.write(1, os.fsencode(' '.join(sys.argv) + chr(10)))")
    argv = ["--standbys", "0", "--state-dir", str(short_path / state), "größe.py", "für"]
    environment = {"LC_ALL": "C", "PYTHONUTF8": utf8_mode}
    with launched(short_path, *argv, warm=False, **environment) as launcher:
        assert launcher.wait() == 0, launcher.err
        assert launcher.out == "größe.py für\n"


def test_arguments_that_are_too_long_end_the_launcher(agent: FakeAgent, script: Path) -> None:
    argv = ["--agent-socket", str(agent.path), str(script), "x" * 100_000, "x" * 100_000]
    with launched(script.parent, *argv, warm=False) as launcher:
        assert launcher.wait() == 1
        assert "shorten the script's arguments" in launcher.err
        assert "did not end within" not in launcher.err  # the rank was never forked


def test_program_takes_the_place_of_a_rank(agent: FakeAgent, tmp_path: Path) -> None:
    """A program that runs a script which calls ``everstep.main`` is told why that cannot work."""
    (tmp_path / "hooked.py").write_text("import everstep; everstep.main(print)")
    program = tmp_path / "bind.sh"
    program.write_text('#!/bin/sh\necho "rank $LOCAL_RANK of $WORLD_SIZE: $*"\n[ $RANK = 0 ] || exec "$@"\n')
    program.chmod(0o700)
    argv = ["--agent-socket", str(agent.path), "--nproc-per-node", "2", "--no-python", "--local-ranks-filter", "1"]
    with launched(tmp_path, *argv, str(program), sys.executable, "hooked.py") as launcher:
        assert launcher.wait() == 1
        assert launcher.out == f"rank 1 of 2: {sys.executable} hooked.py\n"
        assert "this script calls everstep.main: omit --torchrun-script and --no-python" in launcher.err


TORCHRUN_SCRIPT = """
import os, pathlib, signal, sys
import torch, torch.distributed as dist

here = pathlib.Path(__file__).parent
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
snapshot = here / "snapshot.pt"
done = torch.load(snapshot) if snapshot.exists() else 0
(here / f"started-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-{os.getpid()}-{done}").touch()
total = torch.zeros(1)
for step in range(done + 1, 41):
    total.fill_(rank + 1)
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2
    while step == 21 and not (here / "killed").exists():
        signal.sigtimedwait((), 0.02)
    if rank == 0:
        torch.save(step, here / "new.pt")
        os.replace(here / "new.pt", snapshot)
(here / f"finished-{rank}").touch()
dist.destroy_process_group()
"""


@pytest.mark.promise("torchrun-script")
def test_unmodified_torchrun_script_restarts_after_a_kill(short_path: Path) -> None:
    """All ranks start again with a new restart count, and the script continues from its own checkpoint."""
    (short_path / "plain.py").write_text(TORCHRUN_SCRIPT)

    def started(restart: int) -> dict[int, tuple[int, int]]:
        """Return the pid and the step found in the checkpoint, of each rank of a restart."""
        found = [path.name.split("-") for path in short_path.glob(f"started-{restart}-*")]
        return {int(rank): (int(pid), int(done)) for _, _, rank, pid, done in found}

    argv = ["--nproc-per-node", "3", "--max-restarts", "1", "--state-dir", str(short_path / "state"), "plain.py"]
    with launched(short_path, *argv) as launcher:
        launcher.eventually(lambda: len(started(0)) == 3, "all ranks")
        launcher.eventually((short_path / "snapshot.pt").exists, "a checkpoint")
        os.kill(started(0)[1][0], signal.SIGKILL)
        (short_path / "killed").touch()
        launcher.eventually(lambda: len(started(1)) == 3, "all ranks again")
        assert launcher.wait() == 0, launcher.err
    assert len(list(short_path.glob("finished-*"))) == 3
    assert {done > 0 for _, done in started(1).values()} == {True}
    # a rank whose collective fails may be seen before the killed one
    ended = (
        r"ended with (SIGKILL|exit status 1) before the script called everstep.main; all ranks of this node start again"
    )
    assert re.search(ended, launcher.err)


def test_launcher_shows_script_exception_and_exit_status(agent: FakeAgent, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text("import sys\nif '--exit' in sys.argv: sys.exit(7)\nraise KeyError('mine')\n")
    flags = ["--agent-socket", str(agent.path), "-m", "package.train"]
    with launched(tmp_path, *flags) as launcher:
        assert launcher.wait() == 1
        assert "KeyError: 'mine'" in launcher.err
        assert "before the script called everstep.main" in launcher.err
        assert "forkserver.py" not in launcher.err
        assert "runpy" not in launcher.err
    with launched(tmp_path, *flags, "--exit") as launcher:
        assert launcher.wait() == 7


def test_a_launcher_under_nohup_survives_its_terminal(agent: FakeAgent, script: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the launcher
    try:
        with start(agent, script) as launcher:
            worker = holder(launcher, script.parent, 0)
            os.killpg(launcher.pid, signal.SIGHUP)
            os.kill(worker, signal.SIGKILL)
            holder(launcher, script.parent, 0, not_in=(worker,))
            assert launcher.process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_wrong_command_line_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with launched(tmp_path, "--no-python", "./x", warm=False) as launcher:
        assert launcher.wait() == 2
        assert "there is no executable program './x'" in launcher.err


def test_the_launcher_itself_never_imports_torch() -> None:
    code = "import sys, everstep_trainer.launch.command; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
