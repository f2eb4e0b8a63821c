"""Where a node's store listens, how many ranks it offers, and what its standbys do beforehand."""

from __future__ import annotations

import os
import socket

import pytest
from everstep_trainer.launch import job_rendezvous
from everstep_trainer.launch.children import count_ranks
from everstep_trainer.launch.job_rendezvous import rendezvous_host
from everstep_trainer.launch.launcher import listening_socket

from everstep.errors import ConfigurationError
from tests.support.forked import ForkPool


def test_single_node_uses_loopback_or_the_given_address() -> None:
    assert rendezvous_host(None, several_nodes=False) == "127.0.0.1"
    assert rendezvous_host("192.0.2.7", several_nodes=True) == "192.0.2.7"


@pytest.mark.parametrize(
    ("by_name", "by_route", "expected"),
    [
        ("10.0.0.5", "10.9.9.9", "10.0.0.5"),
        ("127.0.1.1", "10.9.9.9", "10.9.9.9"),
        (None, "10.9.9.9", "10.9.9.9"),
        ("127.0.1.1", None, "127.0.0.1"),
    ],
)
def test_several_nodes_use_a_reachable_rendezvous_address(
    monkeypatch: pytest.MonkeyPatch, by_name: str | None, by_route: str | None, expected: str
) -> None:
    monkeypatch.setattr(job_rendezvous, "_by_name", lambda: by_name)
    monkeypatch.setattr(job_rendezvous, "_source_address", lambda host, port: by_route)
    assert rendezvous_host(None, several_nodes=True) == expected


def test_store_listens_on_its_own_address_before_serving() -> None:
    with listening_socket("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with socket.create_connection(listener.getsockname()[:2]):
            pass  # waits in the queue


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


def test_host_without_ipv4_loopback_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        ConfigurationError, match=r"cannot listen on 127\.0\.0\.1: .*: ip addr add 127\.0\.0\.1/8 dev lo"
    ):
        listening_socket("127.0.0.1")
