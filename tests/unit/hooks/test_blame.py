"""Errors of collectives are told from errors of the training function."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from trainer_hooks.blame import describe, full_traceback, is_communication_error, release_frames

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error"),
        dist.DistBackendError("anything"),
        dist.DistNetworkError("Failed to recv, got 0 bytes"),
        dist.DistStoreError("wait timeout after 5000ms, keys: /g1/x"),
    ],
)
def test_a_lost_peer_is_recognized(error):
    assert is_communication_error(error)


@pytest.mark.parametrize(
    "error",
    [ValueError(GLOO), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("x"), OSError("disk")],
)
def test_a_users_own_error_is_not(error):
    assert not is_communication_error(error)


def test_an_error_raised_from_a_lost_peer_counts_as_one():
    error = ValueError("the epoch failed")
    error.__cause__ = RuntimeError(GLOO)
    assert is_communication_error(error)


def test_an_error_while_handling_a_lost_peer_counts_unless_it_says_otherwise():
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


def test_a_description_is_one_bounded_line_and_a_traceback_ends_with_the_error():
    with pytest.raises(ValueError, match="xxx") as caught:
        raise ValueError("x" * 100_000)
    assert len(describe(caught.value)) == 4096
    assert len(full_traceback(caught.value, 1000)) == 1000


def test_released_frames_let_go_of_the_model():
    class Model:
        pass

    def train() -> None:
        model = Model()
        alive.append(weakref.ref(model))
        raise ValueError("mine")

    alive: list[weakref.ref] = []
    try:
        train()
    except ValueError as error:
        caught = error
    assert alive[0]() is not None
    release_frames(caught)
    gc.collect()
    assert alive[0]() is None
