"""What a rank sends about audits: its statements at once, clean steps at most once a second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from everstep_trainer.runtime.generation_session import GenerationSession
from everstep_trainer.sdc.audit import Mismatch

from everstep.clock import ManualClock
from everstep.vocabulary import AuditLink, AuditRole
from everstep.wire.v1.local import WrongProduct
from everstep.wire.v1.training import AuditsClean, AuditStatement
from tests.support.generations import generation


def _session(clock: ManualClock, sent: list[Any]) -> GenerationSession:
    spec, nothing = generation(3), SimpleNamespace()
    return GenerationSession(
        SimpleNamespace(spec=spec, member=spec.roster[0], store=None, device=torch.device("cpu")),  # type: ignore[arg-type]
        directives=nothing,  # type: ignore[arg-type]
        progress=nothing,  # type: ignore[arg-type]
        interrupter=nothing,  # type: ignore[arg-type]
        connect_vault=lambda: nothing,  # type: ignore[arg-type,return-value]
        send=sent.append,
        timeline=None,
        clock=clock,
    )


def test_clean_audits_are_reported_once_a_second() -> None:
    clock, sent = ManualClock(), list[Any]()
    session = _session(clock, sent)
    for step in range(10):
        session.report_clean_audits(step)
        clock.advance(0.3)
    assert [(type(one), one.generation, one.step) for one in sent] == [
        (AuditsClean, 3, 0),
        (AuditsClean, 3, 4),
        (AuditsClean, 3, 8),
    ]


def test_statement_has_all_that_the_audit_says() -> None:
    clock, sent = ManualClock(), list[Any]()
    mismatch = Mismatch(
        link=AuditLink.PEER_REPLAY,
        step=7,
        unit="layer 0",
        owner=0,
        role=AuditRole.OWNER,
        original="a",
        digest="b",
        expects_arbiter=True,
        difference="one bit",
    )
    _session(clock, sent).report_mismatch(mismatch)
    (one,) = sent
    assert isinstance(one, AuditStatement)
    assert (one.generation, one.rank, one.step, one.link) == (3, 0, 7, AuditLink.PEER_REPLAY)
    assert (one.original, one.digest, one.expects_arbiter, one.difference) == ("a", "b", True, "one bit")


def test_wrong_product_goes_to_the_agent_of_its_node() -> None:
    sent = list[Any]()
    product = WrongProduct(work="up", dtype="float32", rows=1, inner=1, columns=1, left=b"0000", right=b"0000")
    _session(ManualClock(), sent).keep_wrong_product(product)
    assert sent == [product]
