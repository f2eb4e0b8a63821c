"""Ports, interfaces, limits and sockets are checked with facts of machines that are wrong in one way each."""

from __future__ import annotations

import errno
import re
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from everstep.doctor import limits, network
from everstep.doctor.memory import MemoryFacts, check_memory, slot_bytes
from everstep.doctor.results import CheckResult, Status, fail, ok, run_checks

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
NO_LIMIT = resource.RLIM_INFINITY


def one(results: Iterable[CheckResult], check: str = "") -> CheckResult:
    found = [result for result in results if check in ("", result.check)]
    assert len(found) == 1
    return found[0]


def test_check_that_raises_becomes_a_warning() -> None:
    def broken() -> Iterable[CheckResult]:
        yield ok("first", "well")
        raise OSError("no such device")

    report = run_checks({"broken": broken, "other": lambda: [ok("other", "well")]})
    assert report.ok
    assert [(result.check, result.status) for result in report.results] == [
        ("first", OK),
        ("broken", WARN),
        ("other", OK),
    ]
    assert not run_checks({"a": lambda: [fail("a", "bad")]}).ok


def test_port_in_use_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert network.bind_error(port) == errno.EADDRINUSE
    assert network.bind_error(0) == 0


@pytest.mark.parametrize(
    ("port", "number", "status", "text"),
    [
        (0, 0, OK, "can listen"),
        (0, errno.EADDRNOTAVAIL, FAIL, "interface lo"),
        (29400, errno.EADDRINUSE, FAIL, "ss -ltnp 'sport = :29400'"),
        (80, errno.EACCES, FAIL, "root's"),
        (29400, errno.EPERM, FAIL, "EPERM"),
    ],
)
def test_ports_are_judged_by_error(port: int, number: int, status: Status, text: str) -> None:
    result = one(network.check_ports({port: number}))
    assert result.status is status
    assert text in result.sentence


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "", OK),
        ("GLOO_SOCKET_IFNAME", "eth0", OK),
        ("GLOO_SOCKET_IFNAME", "eth", FAIL),
        ("GLOO_SOCKET_IFNAME", "eth0,ib7", FAIL),
        ("NCCL_SOCKET_IFNAME", "eth", OK),
        ("NCCL_SOCKET_IFNAME", "=eth", FAIL),
        ("NCCL_SOCKET_IFNAME", "=eth1", OK),
        ("NCCL_SOCKET_IFNAME", "ib", FAIL),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", OK),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", FAIL),
    ],
)
def test_named_interfaces_must_exist(variable: str, value: str, status: Status) -> None:
    environ = {variable: value} if value else {}
    assert one(network.check_interfaces(environ, ["lo", "eth0", "eth1"]), variable).status is status


@pytest.mark.parametrize(
    ("addresses", "status"),
    [(["10.0.0.7", "127.0.1.1"], OK), (["127.0.1.1"], WARN), ([], WARN), (["fe80::1%eth0"], OK)],
)
def test_host_name_should_leave_loopback(addresses: list[str], status: Status) -> None:
    assert one(network.check_host_name("n7", addresses)).status is status


@pytest.mark.parametrize(("files", "status"), [(NO_LIMIT, OK), (4096, OK), (1024, WARN), (256, FAIL)])
def test_open_files_are_limited(files: int, status: Status) -> None:
    assert one(limits.check_limits(files, 0, False), "open files").status is status


@pytest.mark.parametrize(
    ("locked", "rdma", "status"), [(65536, False, OK), (65536, True, WARN), (NO_LIMIT, True, OK), (1 << 30, True, OK)]
)
def test_locked_memory_matters_for_infiniband(locked: int, rdma: bool, status: Status) -> None:
    assert one(limits.check_limits(NO_LIMIT, locked, rdma), "locked memory").status is status


@pytest.mark.parametrize(
    ("text", "ranks", "status"), [("", 8, OK), ("2", 8, OK), ("4", 8, WARN), ("none", 1, FAIL), ("0", 1, FAIL)]
)
def test_threads_of_all_ranks_fit_the_cores(text: str, ranks: int, status: Status) -> None:
    environ = {"OMP_NUM_THREADS": text} if text else {}
    assert one(limits.check_threads(environ, 16, ranks)).status is status


def test_hidden_processes_are_reported() -> None:
    assert one(limits.check_proc(True)).status is OK
    assert "hidepid" in one(limits.check_proc(False)).sentence


def test_state_directory_must_hold_sockets(tmp_path: Path) -> None:
    assert one(limits.check_state_dir(Path("/tmp/everstep-doctor-test/state"))).status is OK
    too_long = one(limits.check_state_dir(Path("/tmp") / ("d" * 90)))
    assert too_long.status is FAIL
    assert "XDG_STATE_HOME" in too_long.sentence


def test_agent_must_answer_where_its_socket_is(short_path: Path) -> None:
    path = short_path / "agent.sock"
    assert one(limits.check_agent(path, False, "")).status is OK
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        refused = limits.connect_error(path)
        listener.listen()
        assert limits.connect_error(path) == ""
    assert one(limits.check_agent(path, True, "")).status is OK
    dead = one(limits.check_agent(path, True, refused))
    assert dead.status is FAIL
    assert "Connection refused" in dead.sentence


def test_missing_native_library_names_its_reason(tmp_path: Path) -> None:
    assert one(limits.check_native(tmp_path, False, True)).status is OK
    assert "EVERSTEP_NATIVE=0" in one(limits.check_native(tmp_path, True, False)).sentence
    assert "C compiler" in one(limits.check_native(tmp_path / "none.so", False, False)).sentence
    assert "AVX2" in one(limits.check_native(tmp_path, False, False)).sentence


GIB = 1 << 30


def statuses(state_bytes: int | None = None, nodes: int = 1, **changed: Any) -> dict[str, tuple[Status, str]]:
    known = {"shm_size": 32 * GIB, "shm_free": 32 * GIB, "total": 64 * GIB, "available": 60 * GIB, "group_left": None}
    results = check_memory(MemoryFacts(**known | changed), state_bytes, nodes)
    return {result.check: (result.status, result.sentence) for result in results}


def test_half_of_the_memory_is_enough_shared_memory() -> None:
    assert {name: status for name, (status, _) in statuses().items()} == {
        "shared memory": Status.OK,
        "memory limit": Status.OK,
    }


@pytest.mark.parametrize(("size", "status"), [(64 << 20, Status.FAIL), (8 * GIB, Status.WARN), (16 * GIB, Status.OK)])
def test_small_shared_memory_is_reported(size: int, status: Status) -> None:
    assert statuses(shm_size=size, shm_free=size)["shared memory"][0] is status


def test_slots_are_summed_as_the_tuning_page_says() -> None:
    """docs/how-to/tune.md: the examples per node."""
    assert round(slot_bytes(33_600_000, 1, 5) / 1e6) == 336
    assert round(slot_bytes(33_600_000, 4, 5) / 1e6) == 112
    assert round(slot_bytes(84_000_000_000, 4, 5) / 1e9) == 280
    assert round(slot_bytes(84_000_000_000, 16, 5) / 1e9) == 56


@pytest.mark.parametrize(
    ("state", "nodes", "status", "text"),
    [
        (2 * GIB, 1, Status.OK, "5 slots need 20.0 GiB"),
        (5 * GIB, 1, Status.WARN, r"2 slots \(20.0 GiB\) are kept"),
        (5 * GIB, 4, Status.OK, "5 slots need 16.7 GiB"),
        (20 * GIB, 1, Status.FAIL, "even 2 slots need 80.0 GiB"),
    ],
)
def test_model_is_compared_with_free_memory(state: int, nodes: int, status: Status, text: str) -> None:
    found, sentence = statuses(state, nodes)["checkpoint memory"]
    assert found is status
    assert re.search(text, sentence)


def test_control_group_limits_checkpoints() -> None:
    found = statuses(2 * GIB, group_left=10 * GIB)
    assert found["memory limit"][1] == "a control group leaves 10.0 GiB of memory to this process"
    assert found["checkpoint memory"][0] is Status.WARN
