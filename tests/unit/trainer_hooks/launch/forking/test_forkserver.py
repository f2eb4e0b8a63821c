from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import MalformedMessage
from everstep_trainer.launch.forking.forkserver import preload
from tests.support.processes.fork_pool import ROOT, ChildFailed, ForkPool, fork_pool
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow  # starts processes


def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    raise ValueError("on purpose")


def sleep(*_: object) -> None:
    signal.pause()


def process_state() -> dict[str, object]:
    import gc

    return {
        "leads_session": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "collects": gc.isenabled(),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in open_descriptors()),
        "name": os.environ.get("NAME"),
    }


def open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


def start_grandchild(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(path).write_text(str(child.pid))
    signal.pause()


def torch_state() -> tuple[bool, int]:
    import torch

    return torch.cuda.is_initialized(), int(torch.ones(3).sum())


@pytest.fixture
def bare() -> Iterator[ForkPool]:
    """A fork server that imports nothing, for tests that do not need torch."""
    with fork_pool(modules=()) as pool:
        yield pool


def test_child_starts_with_clean_process_state(bare: ForkPool) -> None:
    state = bare.start(process_state, environment={"NAME": "n"}).result()
    descriptors = state.pop("descriptors")
    assert state == {
        "leads_session": True,
        "interrupt": True,
        "terminate": True,
        "blocked": 0,
        "collects": True,
        "name": "n",
    }
    assert not [name for name in descriptors if name in ("socket", "anon_inode")], descriptors


def test_exception_in_a_child_ends_only_the_child(bare: ForkPool) -> None:
    with pytest.raises(ChildFailed, match="on purpose"):
        bare.start(fail).result()
    assert bare.start(add, 1, 1).result() == 2


def test_a_death_by_signal_is_reported_as_such(bare: ForkPool) -> None:
    child = bare.start(sleep)
    os.kill(child.pid, signal.SIGTERM)
    end = child.wait()
    assert (end.pid, end.code, end.signal) == (child.pid, None, signal.SIGTERM)


def test_killed_child_ends_its_descendants(bare: ForkPool, tmp_path: Path) -> None:
    child = bare.start(start_grandchild, str(tmp_path / "pid"))
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "its number")
    grandchild = int((tmp_path / "pid").read_text())
    assert is_running(grandchild)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    until(lambda: not is_running(grandchild), "the grandchild's end")


def server_of(pool: ForkPool) -> subprocess.Popen[bytes]:
    assert pool._server is not None
    return pool._server


def test_children_die_when_their_server_is_killed(bare: ForkPool) -> None:
    pids = [bare.start(sleep, n).pid for n in range(3)]
    server = server_of(bare)
    server.kill()
    server.wait()
    until(lambda: not any(map(is_running, pids)), "their end")


def test_oversized_message_is_refused_with_advice(bare: ForkPool) -> None:
    with pytest.raises(MalformedMessage, match="shorten the script's arguments"):
        bare.start(add, "x" * (1 << 18), 1)


def test_children_have_torch_and_no_cuda_context(forks: ForkPool) -> None:
    assert forks.start(torch_state).result() == (False, 3)


def devices() -> int:
    import torch

    return torch.cuda.device_count()


def compute_on_a_device() -> float:
    import torch

    return float(torch.ones(8, device="cuda").sum())


@pytest.mark.gpu
def test_children_may_each_use_cuda(forks: ForkPool) -> None:
    if forks.start(devices).result() == 0:
        pytest.skip("no CUDA device here")
    assert [child.result() for child in [forks.start(compute_on_a_device) for _ in range(2)]] == [8.0, 8.0]


def test_missing_package_is_an_error_missing_submodule_is_not() -> None:
    command = "from everstep_trainer.launch.forking.forkserver import preload; preload({modules!r})"

    def run(*modules: str) -> subprocess.CompletedProcess[str]:
        code = command.format(modules=modules)
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert callable(preload)
    assert run("json.of_another_version").returncode == 0
    assert "no_such_package" in run("no_such_package").stderr


@pytest.mark.parametrize(
    ("source", "status", "refusal"),
    [
        ("value = 1", 0, ""),
        ("raise ValueError('no')", 1, "cannot be imported here: ValueError('no')"),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", 1, "starts threads"),
    ],
)
def test_preload_refuses_fork_unsafe_modules(tmp_path: Path, source: str, status: int, refusal: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    importing = "import sys; from everstep_trainer.launch.forking.forkserver import preload_requested as p"
    code = f"{importing}; p(); sys.modules['mine']"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "EVERSTEP_PRELOAD": "mine"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert refusal in done.stderr


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.promise("fork-server")
def test_killed_server_is_replaced_without_another_import(bare: ForkPool) -> None:
    """The next server is forked from the same zygote, whose children keep nothing of the previous server."""
    before = bare.start(sleep)
    server = parent_of(before.pid)
    assert parent_of(server) == server_of(bare).pid
    os.kill(server, signal.SIGKILL)
    until(lambda: not is_running(before.pid), "the end of what it had forked")
    bare.restart_server()
    after = bare.start(sleep)
    assert parent_of(after.pid) != server
    assert parent_of(parent_of(after.pid)) == server_of(bare).pid


def test_stopped_server_ends_with_its_zygote(bare: ForkPool) -> None:
    child = bare.start(sleep)
    server = parent_of(child.pid)
    os.kill(server, signal.SIGSTOP)
    zygote = server_of(bare)
    zygote.terminate()
    assert zygote.wait(60) == 0
    assert not is_running(server)
    assert not is_running(child.pid)
