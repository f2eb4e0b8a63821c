"""The address of a node's store, the number of ranks that it offers, and the preparation of its standbys."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from everstep.errors import ConfigurationError
from everstep_trainer.launch.children import count_ranks
from everstep_trainer.launch.forking.process_setup import (
    TOUCH_PIECE_BYTES,
    anonymous_bytes,
    keep_freed_memory,
    largest_rank_bytes,
    pretouch_heap,
)
from everstep_trainer.launch.launcher import listening_socket
from everstep_trainer.launch.services import job_rendezvous
from everstep_trainer.launch.services.job_rendezvous import rendezvous_host
from tests.support.processes.fork_pool import ForkPool


def test_single_node_uses_loopback_or_the_given_address() -> None:
    assert rendezvous_host(None, several_nodes=False) == "127.0.0.1"
    assert rendezvous_host("192.0.2.7", several_nodes=True) == "192.0.2.7"


@pytest.mark.parametrize(
    ("by_name", "by_route", "by_route6", "by_name6", "expected"),
    [
        ("10.0.0.5", "10.9.9.9", "fd00::9", "fd00::5", "10.0.0.5"),
        ("127.0.1.1", "10.9.9.9", "fd00::9", "fd00::5", "10.9.9.9"),
        (None, "10.9.9.9", None, None, "10.9.9.9"),
        ("127.0.1.1", None, "fd00::9", "fd00::5", "fd00::9"),
        (None, None, None, "fd00::5", "fd00::5"),
        ("127.0.1.1", None, None, "::1", "127.0.0.1"),
    ],
)
def test_several_nodes_use_a_reachable_rendezvous_address(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by_name: str | None,
    by_route: str | None,
    by_route6: str | None,
    by_name6: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(job_rendezvous, "_by_name", {socket.AF_INET: by_name, socket.AF_INET6: by_name6}.get)
    monkeypatch.setattr(job_rendezvous, "_source_address", lambda host, port: by_route6 if ":" in host else by_route)
    assert rendezvous_host(None, several_nodes=True) == expected
    assert ("--local-addr" in caplog.text) is (expected == "127.0.0.1")


def test_address_of_another_machine_is_refused_with_advice() -> None:
    with pytest.raises(ConfigurationError, match="--local-addr"):
        listening_socket("192.0.2.7")


def test_ranks_are_counted_by_core_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_ranks("cpu") == os.cpu_count()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert (count_ranks("auto"), count_ranks("gpu")) == (os.cpu_count(), 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert (count_ranks("auto"), count_ranks("gpu"), count_ranks("cpu")) == (8, 8, os.cpu_count())


def warm_up_and_draw() -> tuple[float, float, int]:
    import torch

    from everstep_trainer.launch.forking.process_setup import warm_up_torch

    torch.manual_seed(7)
    expected = torch.rand(1).item()
    torch.manual_seed(7)
    warm_up_torch()
    return expected, torch.rand(1).item(), len(os.listdir("/proc/self/task"))


def test_warm_up_preserves_the_random_state(forks: ForkPool) -> None:
    expected, drawn, threads = forks.start(warm_up_and_draw).result()
    assert drawn == expected
    assert threads == 1


def test_host_without_ipv4_loopback_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        ConfigurationError, match=r"cannot listen on 127\.0\.0\.1: .*: ip addr add 127\.0\.0\.1/8 dev lo"
    ):
        listening_socket("127.0.0.1")


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_models() -> list[int]:
    """Return the page faults of building 32 MiB of tensors repeatedly, each time after the last were freed. glibc's
    aligned allocation needs one or two rounds until its free blocks fit."""
    import torch

    keep_freed_memory()
    counts = []
    for _ in range(5):
        before = page_faults()
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        counts.append(page_faults() - before)
        del tensors
    return counts


def faults_after_touching(wanted: int) -> tuple[int, int, int]:
    """Return the bytes touched, the growth of resident memory, and the page faults of building as much afterwards."""
    import torch

    keep_freed_memory()
    before = anonymous_bytes(os.getpid())
    touched = pretouch_heap(wanted)
    grown = anonymous_bytes(os.getpid()) - before
    first = page_faults()
    tensors = [torch.ones(1 << 20) for _ in range(wanted // (4 << 20) - 1)]
    count = page_faults() - first
    del tensors
    return touched, grown, count


def test_freed_model_memory_is_reused_without_page_faults(forks: ForkPool) -> None:
    first, *_, last = forks.start(faults_of_models).result()
    assert first > 8000  # 32 MiB in pages of 4 KiB
    assert last < first / 10


def test_pretouched_memory_serves_tensors_without_page_faults(forks: ForkPool) -> None:
    touched, grown, count = forks.start(faults_after_touching, 4 * TOUCH_PIECE_BYTES).result()
    assert touched == 4 * TOUCH_PIECE_BYTES
    assert grown > 3 * TOUCH_PIECE_BYTES
    assert count < 2000  # of 15,000 pages


def test_largest_sibling_is_zero_without_sibling_ranks() -> None:
    assert largest_rank_bytes() == 0
