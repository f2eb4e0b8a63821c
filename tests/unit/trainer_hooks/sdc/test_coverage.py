"""Rank 0 logs once in a process what no audit covers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from everstep_trainer.sdc import coverage
from everstep_trainer.sdc.audit import AuditSetup
from everstep_trainer.sdc.build import build_chain
from everstep_trainer.sdc.presets import audit_options
from tests.unit.trainer_hooks.sdc.audited_models import ConvNet, Gpt, mlp

OUTSIDE = "code outside of these modules, such as a loss function, is not checked"
SEE = "See https://everstep.readthedocs.io/how-to/audits/"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_said", set())


def setup_of(rank: int = 0, world: int = 3, **objects: object) -> AuditSetup:
    return AuditSetup(
        rank=rank,
        world_size=world,
        nodes=(),
        device=torch.device("cpu"),
        objects=objects,
        has_replica_per_rank=True,
        report=lambda mismatch: None,
    )


def lines_of(caplog: pytest.LogCaptureFixture, preset: str, setup: AuditSetup) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=coverage.log.name):
        build_chain(audit_options(preset, is_sharded=False), setup, 1, lambda step: None, preset)  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records]


def test_line_names_audits_that_are_off(caplog: pytest.LogCaptureFixture) -> None:
    norms = "audit gradient_norm is off: it needs 3 ranks, each with a replica of its own, under run.replicate or"
    (line,) = lines_of(caplog, "light", setup_of(world=2, model=Gpt()))
    buffers = "audit gradient_buffer is off: it needs run.replicate in exact mode"
    expected = f"all modules with parameters are checked; {norms} fully_shard; {buffers}; {OUTSIDE}. {SEE}"
    assert line == f"audits (light): {expected}"


def test_line_is_short_where_the_launcher_keeps_the_list(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    def keep(line: str) -> bool:
        kept.append(line)
        return True

    monkeypatch.setattr(coverage, "keep_line", keep)
    monkeypatch.setenv("EVERSTEP_JOB", "vit")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    (line,) = lines_of(caplog, "light", setup_of(model=model, teacher=mlp().requires_grad_(False)))
    assert line == "audits (light) check 4 of 8 modules, 2 gaps; list: everstep logs vit --launcher"
    assert coverage.Coverage("light", [], setup_of()).summarize() == ""
    assert kept[0].startswith("audits (light): 4 of 8 modules with parameters are not checked: model.layers.0.norm")


def test_line_names_modules_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    (line,) = lines_of(caplog, "light", setup_of(model=model, teacher=mlp().requires_grad_(False)))
    missing, *_ = line.split("; ")
    assert missing == (
        "audits (light): 4 of 8 modules with parameters are not checked: "
        "model.layers.0.norm, model.layers.1.norm (SyncBatchNorm: its forward pass contains collectives), "
        "teacher.0, teacher.3 (it is not trained)"
    )


def test_coverage_line_is_logged_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    setup = setup_of(model=mlp())
    assert not lines_of(caplog, "light", setup_of(rank=1, model=mlp()))
    assert len(lines_of(caplog, "light", setup)) == 1
    assert not lines_of(caplog, "light", setup), "the next generation"
    assert not lines_of(caplog, "off", setup_of(model=Gpt()))


def test_replaced_forward_pass_is_left_out_by_matmul(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    model[0].forward = lambda x: x
    (line,) = lines_of(caplog, "standard", setup_of(world=1, model=model))
    assert "1 of 2 modules with parameters are not checked: 0; " in line
