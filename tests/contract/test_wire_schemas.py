from __future__ import annotations

from types import ModuleType

import jsonschema
import msgspec
import pytest

from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire import export
from everstep.wire.v1 import agent
from everstep.wire.v1.agent import Heartbeat, NumberedReport, Register, Reports
from everstep.wire.v1.training import FindingRaised, JobSpec, LauncherJoined, RankProgress

FINDING = Finding(kind=FindingKind.GPU_XID, subject="gpu0", severity=Severity.CRITICAL, message="fell off", xid=79)
MESSAGES = (
    Register(protocols=(1,), node="n1", incarnation=1, agent_version="1", vault="h:1", findings=(FINDING,)),
    Heartbeat(
        incarnation=1,
        seq=2,
        sent_at=1.0,
        findings=(),
        ranks=(RankProgress(job="j", generation=1, rank=0, step=5, step_s=0.1, loss=1.0),),
    ),
    Reports(
        incarnation=1,
        reports=(
            NumberedReport(
                number=1, body=LauncherJoined(job="j", at=1.0, spec=JobSpec(job="j"), launcher=1, store="127.0.0.1:2")
            ),
            NumberedReport(number=2, body=FindingRaised(finding=FINDING)),
        ),
    ),
)


@pytest.mark.parametrize("module", export.MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_checked_in_schema_is_current(module: ModuleType) -> None:
    assert export.schema_path(module).read_text() == export.schema_text(module), (
        "run `make schema` and review the difference"
    )


@pytest.mark.parametrize("module", export.MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_schema_is_valid_json_schema(module: ModuleType) -> None:
    jsonschema.Draft202012Validator.check_schema(export.module_schema(module))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_satisfies_its_schema(message: msgspec.Struct) -> None:
    schema = {**export.module_schema(agent), "$ref": f"#/$defs/{type(message).__name__}"}
    jsonschema.Draft202012Validator(schema).validate(msgspec.json.decode(msgspec.json.encode(message)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_a_round_trip(message: msgspec.Struct) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
