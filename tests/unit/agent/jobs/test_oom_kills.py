"""The kernel's kills for lack of memory, distinguished from other SIGKILLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep.wire.v1.training import RankLost
from everstep_agent.jobs.local_processes import ProcessEnd
from everstep_agent.jobs.oom_kills import OomKills
from everstep_agent.jobs.registry import JobRegistry
from tests.support.agents.node_jobs import NodeJobs, exited

GIB = 1 << 30


class Machine:
    """The files of a kernel: one control group with process 77, and a log."""

    def __init__(self, folder: Path, version: int = 2, pids: tuple[int, ...] = (77,)) -> None:
        self.version, self.clock = version, ManualClock()
        self.root, self.processes, self.log = folder / "cgroup", folder / "proc", folder / "kernel.log"
        self.group = self.root / ("memory" if version == 1 else "") / "job"
        self.group.mkdir(parents=True)
        for pid in pids:
            (self.processes / str(pid)).mkdir(parents=True)
            line = "4:memory:/job\n" if version == 1 else "0::/job\n"
            (self.processes / str(pid) / "cgroup").write_text(line)
        (self.processes / "meminfo").write_text(f"MemTotal: {24 << 20} kB\n")
        self.log.write_text("an old line: Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB\n")
        self.set_kills(3)
        self.set_limit(2 * GIB)
        self.kills = OomKills(self.clock, str(self.log), self.root, self.processes)

    def set_kills(self, count: int) -> None:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        (self.group / name).write_text(f"oom 9\noom_kill {count}\n")

    def set_limit(self, limit: int | None) -> None:
        name, none = ("memory.max", "max") if self.version == 2 else ("memory.limit_in_bytes", str(1 << 62))
        (self.group / name).write_text(f"{limit or none}\n")

    def write(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(line + "\n")


@pytest.mark.parametrize("version", [1, 2])
def test_counted_kill_explains_one_end(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version, pids=(77, 78))
    for pid in (77, 78):
        machine.kills.watch(pid)
    machine.set_kills(4)
    assert machine.kills.explain(77) == "its control group may use 2.0 GiB"
    assert machine.kills.explain(78) == "", "the kernel killed one process only"


def test_kill_by_a_person_is_no_kill_of_the_kernel(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.kills.watch(77)
    machine.clock.advance(5.0)
    machine.kills.poll([77])
    assert machine.kills.explain(77) == ""


def test_kernel_log_names_the_process_and_its_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.set_limit(None)
    machine.kills.watch(77)
    machine.write("[1.0] Out of memory: Killed process 12 (python) total-vm:9kB, anon-rss:9kB, file-rss:0kB")
    assert machine.kills.explain(12) == "it used 0.0 GiB, and the machine has 24.0 GiB"
    memcg = "[2.0] Memory cgroup out of memory: Killed process 77 (everstep-rank3) total-vm:9kB, anon-rss:6291456kB"
    machine.write(memcg)
    assert machine.kills.explain(77) == "it used 6.0 GiB, and the machine has 24.0 GiB"


def _node_with(machine: Machine) -> NodeJobs:
    node = NodeJobs()
    node.jobs = JobRegistry(
        "n1",
        node.clock,
        node,
        exit_grace_s=0.003,
        stopped_after_s=0.3,
        unresponsive_after_s=1.0,
        oom_kills=OomKills(node.clock, "", machine.root, machine.processes),
    )
    return node


@pytest.mark.parametrize(("counted", "sentence"), [(4, "its control group may use 2.0 GiB"), (3, "")])
def test_lost_rank_tells_whether_memory_was_short(tmp_path: Path, counted: int, sentence: str) -> None:
    machine = Machine(tmp_path, pids=tuple(range(1000, 1010)))
    node = _node_with(machine)
    launcher, rank = node.launcher(), node.rank(0)
    node.regroup(1)
    machine.set_kills(counted)
    node.jobs.handle_message(launcher, exited(rank))
    node.jobs.handle_disconnect(rank, "its connection closed")
    node.wait()
    (lost,) = node.reports_of(RankLost)
    assert (lost.signal, lost.out_of_memory) == (9, sentence)


def test_known_signal_tells_of_short_memory_before_launcher(tmp_path: Path) -> None:
    machine = Machine(tmp_path, pids=tuple(range(1000, 1010)))
    node = _node_with(machine)
    node.launcher()
    rank = node.rank(0)
    node.regroup(1)
    machine.set_kills(4)
    node.jobs.handle_disconnect(rank, "its process ended", ProcessEnd(signal=9))
    node.wait()
    assert node.reports_of(RankLost)[0].out_of_memory == "its control group may use 2.0 GiB"
