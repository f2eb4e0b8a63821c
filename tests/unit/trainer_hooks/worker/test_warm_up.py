"""A standby runs the hooks' code in advance, which changes nothing that the script can see."""

from __future__ import annotations

import logging

import pytest
import torch

from everstep_trainer.worker.warm_up import warm_up_tracking


def test_tracking_is_warmed_up_unseen(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_rng_state()
    with caplog.at_level(logging.DEBUG), torch.no_grad():
        warm_up_tracking()
        assert not torch.is_grad_enabled()
    assert caplog.records == []
    assert torch.equal(torch.get_rng_state(), before)


def test_failed_warm_up_is_only_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a part of torch has moved")

    monkeypatch.setattr("everstep_trainer.worker.warm_up.divide_state", fail)
    with caplog.at_level(logging.DEBUG):
        warm_up_tracking()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("DEBUG", "the hooks cannot be warmed up")
