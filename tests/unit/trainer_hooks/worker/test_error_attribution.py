"""Errors of collectives are distinguished from errors of the training function."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import CollectiveFailed, UserError
from everstep_trainer.worker.error_attribution import (
    UnattributedFailures,
    clear_frames,
    describe_error,
    explain_missing_step,
    full_traceback,
    is_communication_error,
)
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks import training_functions
from tests.support.ranks.node_ranks import NodeRanks, node_ranks

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error"),
        RuntimeError("NCCL AllReduce failed: unhandled system error (run with ...) \nNCCL Last Error: socket closed"),
        RuntimeError("NCCL Async Error: remote process exited or there was a network error \nNCCL Last Error: "),
        RuntimeError("failed to get async error: internal error \nNCCL Last Error: "),
        RuntimeError("NCCL operation timed out"),
        RuntimeError("NCCL communicator was aborted after a previous error"),
        RuntimeError("Failed to initialize NCCL communicator: unhandled system error"),
        RuntimeError("Failed to get NCCL unique ID: internal error"),
        dist.DistBackendError("anything"),
        dist.DistNetworkError("Failed to recv, got 0 bytes"),
        dist.DistStoreError("wait timeout after 5000ms, keys: /g1/x"),
    ],
)
def test_a_lost_peer_is_recognized(error: Exception) -> None:
    assert is_communication_error(error)


def _all_reduce(_rank: int) -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


def _messages(rank: int) -> None:
    while True:
        dist.recv(torch.ones(1000), 1) if rank == 0 else dist.send(torch.ones(1000), 0)


def _replicas(_rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    while True:
        model(torch.ones(2, 64)).sum().backward()


def _monitored_barrier(_rank: int) -> None:
    while True:
        dist.monitored_barrier()


def _new_group(rank: int) -> None:
    if rank == 0:
        dist.new_group([0, 1], timeout=timedelta(seconds=0.5))


def _key_of_the_store(rank: int) -> None:
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=0.2))


def raised(port: int, rank: int, use: Callable[[int], None]) -> list[object]:
    """Return how rank 0 of two classifies torch's error after rank 1 has died during ``use``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("g", store), rank=rank, world_size=2)
    store.set(f"there/{rank}", "")
    try:
        use(rank)
    except RuntimeError as error:
        return [is_communication_error(error), describe_error(error)]
    return []


@pytest.mark.promise("user-error")
@pytest.mark.parametrize("use", [_all_reduce, _messages, _replicas, _monitored_barrier, _new_group, _key_of_the_store])
def test_torch_error_of_a_lost_peer_is_recognized(forks: ForkPool, use: Callable[[int], None]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    left, lost = (forks.start(raised, store.port, rank, use) for rank in range(2))
    store.wait(["there/0", "there/1"], timedelta(seconds=30))
    lost.kill()
    recognized, text = left.result()
    assert recognized, text


@pytest.mark.promise("user-error")
@pytest.mark.parametrize(
    "text",
    [
        "http://bucket/shard-7: Connection refused",
        "Connection reset by peer",
        "reading /data/gloo/shard-3 failed",
        "Caught RuntimeError in DataLoader worker process 0.\n" + GLOO,
        "NCCL is not what this model wants",
        "NCCL only supports CUDA tensors, but got a tensor on cpu",
        "Expected tensor on cuda:0 but found tensor on cpu",
        "the log said\nfirst: a line\nNCCL Last Error: none",
        "Failed to initialize the data loader",
    ],
)
def test_connection_wording_alone_stays_a_user_error(text: str) -> None:
    assert not is_communication_error(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [ValueError(GLOO), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("x"), OSError("disk")],
)
def test_user_error_is_not_a_communication_error(error: Exception) -> None:
    assert not is_communication_error(error)


def test_error_while_handling_a_lost_peer_counts_if_unsuppressed() -> None:
    def fail(suppress: bool) -> BaseException:
        try:
            try:
                raise RuntimeError(GLOO)
            except RuntimeError:
                if suppress:
                    raise ValueError("mine") from None
                raise ValueError("mine")  # noqa: B904 - the context is the point
        except ValueError as error:
            return error

    assert is_communication_error(fail(suppress=False))
    assert not is_communication_error(fail(suppress=True))


def test_description_is_bounded_and_traceback_keeps_its_end() -> None:
    with pytest.raises(ValueError, match="xxx") as caught:
        raise ValueError("x" * 100_000)
    assert len(describe_error(caught.value)) == 4096
    assert len(full_traceback(caught.value, 1000)) == 1000


def test_description_of_a_worker_traceback_is_its_last_line() -> None:
    text = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File ..."
    assert describe_error(KeyErrorOfAWorker(f"{text}\nKeyError: 'label'\n")) == (
        "KeyErrorOfAWorker: Caught KeyError in DataLoader worker process 0. KeyError: 'label'"
    )
    cuda = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`.\n")
    assert "\n" not in describe_error(cuda)
    assert describe_error(MemoryError()) == "MemoryError"


class KeyErrorOfAWorker(Exception):
    pass


class Unspeakable(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_unprintable_errors_are_still_described() -> None:
    name = os.fsdecode(b"data/\xff.bin")
    error = FileNotFoundError(name)
    assert describe_error(error) == "FileNotFoundError: data/\\udcff.bin"
    full_traceback(error).encode()
    assert not is_communication_error(Unspeakable())
    assert describe_error(Unspeakable()) == "Unspeakable: <exception str() failed>"
    assert "Unspeakable" in full_traceback(Unspeakable())


def test_released_frames_free_the_model() -> None:
    class Model:
        pass

    def train() -> None:
        model = Model()
        alive.append(weakref.ref(model))
        raise ValueError("mine")

    alive: list[weakref.ref[Any]] = []
    try:
        train()
    except ValueError as error:
        caught = error
    assert alive[0]() is not None
    clear_frames(caught)
    gc.collect()
    assert alive[0]() is None


def test_repeated_failure_at_one_step_becomes_a_user_error() -> None:
    tried = UnattributedFailures(3)
    assert not tried.count_failure(7, GenerationReason.NODE_LOST)
    assert not tried.count_failure(7, GenerationReason.COLLECTIVE_FAILED)
    assert tried.count_failure(7, GenerationReason.COLLECTIVE_FAILED)


def test_progress_or_a_named_loss_resets_the_failure_count() -> None:
    tried = UnattributedFailures(2)
    assert not tried.count_failure(7, GenerationReason.FORMED)
    assert not tried.count_failure(8, GenerationReason.COLLECTIVE_FAILED)
    assert not tried.count_failure(8, GenerationReason.RANK_LOST)
    assert tried.count_failure(8, GenerationReason.COLLECTIVE_FAILED)


def is_of_first_rank(generation: int, message: CollectiveFailed) -> bool:
    return (message.generation, message.rank) == (generation, 0)


def _blind(scene: NodeRanks, number: int) -> None:
    scene.form_generation(number, 0, 1, reason=GenerationReason.COLLECTIVE_FAILED)


@pytest.mark.promise("user-error")
def test_persistent_lookalike_error_ends_the_job_with_traceback(forks: ForkPool) -> None:
    with node_ranks(forks, training_functions.fail_like_gloo_at_step_3, max_unattributed_failures=3) as scene:
        scene.start(0, 1)
        scene.form_generation(1, 0, 1)
        for number in (1, 2):
            scene.wait_for_messages(CollectiveFailed, 1, where=partial(is_of_first_rank, number))
            _blind(scene, number + 1)
        error = scene.wait_for_messages(UserError, 1)[0]
        assert (error.generation, error.rank, error.step) == (3, 0, 2)
        assert "fail_like_gloo_at_step_3" in error.traceback
        assert not [
            m
            for p in scene.agent.peers
            for m in p.messages
            if isinstance(m, CollectiveFailed) and m.rank == 0 and m.generation == 3
        ]
        assert scene.finish(ok=False, reason="a user's error") == [1, 1]


def test_missing_variable_of_the_loop_is_explained() -> None:
    assert "Set the variable before the loop" in explain_missing_step(UnboundLocalError("loss"))
    assert explain_missing_step(ValueError("loss")) == ""
