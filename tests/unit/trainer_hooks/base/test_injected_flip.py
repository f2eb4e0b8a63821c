"""A rank flips a bit of a parameter on request: once, before an update, and only if its job allows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from everstep.chaos.targets import FLIP_SIGNAL
from everstep_trainer.base.injected_flip import accept_requests, flip_bit, flip_if_requested
from everstep_trainer.launch.assignment import ALLOW_BIT_FLIPS_VARIABLE


@pytest.fixture
def own_handler() -> Iterator[None]:
    before = signal.getsignal(FLIP_SIGNAL)
    yield
    signal.signal(FLIP_SIGNAL, before)


@pytest.mark.usefixtures("own_handler")
def test_request_flips_one_bit_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ALLOW_BIT_FLIPS_VARIABLE, "1")
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    assert accept_requests()
    assert not flip_if_requested(optimizer)
    os.kill(os.getpid(), FLIP_SIGNAL)
    assert flip_if_requested(optimizer)
    assert not flip_if_requested(optimizer)
    differing = before.view(torch.int32) ^ model.weight.detach().view(torch.int32)
    assert [int(bits) for bits in differing.flatten() if bits] == [1 << 23]
    assert "everstep chaos flip: bit 23" in caplog.text


@pytest.mark.usefixtures("own_handler")
def test_job_without_consent_installs_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_BIT_FLIPS_VARIABLE, raising=False)
    before = signal.getsignal(FLIP_SIGNAL)
    assert not accept_requests()
    assert signal.getsignal(FLIP_SIGNAL) is before


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_flipped_element_is_doubled_or_halved(kind: torch.dtype) -> None:
    tensor = torch.tensor([[0.25, -1.5], [0.0, 0.5]], dtype=kind)
    before = tensor.clone()
    flip_bit(tensor)
    assert (tensor != before).nonzero().tolist() == [[0, 1]]
    assert abs(float(tensor[0, 1])) in (0.75, 3.0)


@pytest.mark.usefixtures("own_handler")
def test_optimizer_without_floats_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_BIT_FLIPS_VARIABLE, "1")
    assert accept_requests()
    os.kill(os.getpid(), FLIP_SIGNAL)
    assert not flip_if_requested(torch.optim.SGD([torch.zeros(0)], lr=0.1))
