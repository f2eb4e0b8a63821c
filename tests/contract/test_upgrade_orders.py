"""Messages of releases that differ by fields: each release decodes the other's messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, GenerationReason, Severity
from everstep.wire.v1.agent import (
    Domain,
    Gpu,
    Heartbeat,
    HeartbeatAnswer,
    Host,
    NumberedReport,
    Register,
    Registered,
    Reports,
)
from everstep.wire.v1.base import Message, Request
from everstep.wire.v1.directives import Directive, NewGeneration, VersionNotice
from everstep.wire.v1.local import ConnectionRole, Hello
from everstep.wire.v1.training import (
    GenerationSpec,
    Holder,
    JobSpec,
    LauncherJoined,
    RankProgress,
    RestoreRule,
    SpillPlan,
    VersionSealed,
)
from everstep.wire.v1.vault_reports import NodeGroup, Protection

GPU = Gpu(index=0, uuid="GPU-0", name="H100", pci_bus_id="0", memory_bytes=1 << 36, part_number="900-2G", vbios="96")
SPEC = JobSpec(job="j", max_nodes=2)
GENERATION = GenerationSpec(
    job="j",
    number=3,
    reason=GenerationReason.FORMED,
    sentence="forms",
    trace="t",
    seats=("n1", "n2"),
    store="n1:8000",
    store_node="n1",
    restore=RestoreRule(
        floor=Version(2, 5),
        protection=Protection(
            version=Version(2, 4),
            seats=("n1", "n2"),
            nproc_per_node=1,
            groups=(NodeGroup(members=("n1", "n2"), parity=("n3", "n4")),),
        ),
        storage_url="/checkpoints/2-5",
        older_storage_urls=("/checkpoints/2-1",),
    ),
    holders=(Holder(node="n1", vault="n1:7000", rack="r1"),),
    replica_nodes={"n1": ("n2",)},
    secret="00",
    spec=SPEC,
    issued_at=1.0,
)
TOLD: tuple[Message, ...] = (
    Register(
        protocols=(1,),
        node="n1",
        incarnation=1,
        agent_version="1",
        vault="n1:7000",
        domain=Domain(rack="r1"),
        labels={"pool": "a"},
        gpus=(GPU,),
        host=Host(vendor="ACME", kernel="6.1"),
        findings=(Finding(kind=FindingKind.GPU_XID, subject="GPU-0", severity=Severity.CRITICAL, message="m", xid=79),),
    ),
    Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=1, controller="c", server_at=1.0),
    Heartbeat(
        incarnation=1,
        seq=1,
        sent_at=1.0,
        ranks=(RankProgress(job="j", generation=3, rank=0, step=1, step_s=0.1),),
    ),
    HeartbeatAnswer(
        server_at=1.0,
        directives=(
            Directive(seq=1, body=NewGeneration(spec=GENERATION)),
            Directive(
                seq=2,
                body=VersionNotice(
                    job="j", generation=3, committed=Version(2, 5), candidate=9, pinned=(Version(2, 4),)
                ),
            ),
        ),
    ),
    Reports(
        incarnation=1,
        reports=(
            NumberedReport(number=1, body=LauncherJoined(job="j", at=1.0, spec=SPEC, launcher=1, store="n1:8000")),
            NumberedReport(
                number=2,
                body=VersionSealed(
                    job="j",
                    at=1.0,
                    generation=3,
                    rank=0,
                    version=Version(3, 1),
                    bytes=1,
                    durable=True,
                    digests={"w": "d"},
                ),
            ),
        ),
    ),
    Hello(protocols=(1,), role=ConnectionRole.RANK, job="j", pid=1, local_rank=0),
)
ADDED: list[tuple[type[Message], str, Message]] = [
    (Gpu, "vbios", GPU),
    (Register, "host", TOLD[0]),
    (Holder, "rack", GENERATION.holders[0]),
    (RestoreRule, "older_storage_urls", GENERATION.restore),
    (RestoreRule, "protection", GENERATION.restore),
    (VersionNotice, "pinned", TOLD[3].directives[1].body),  # type: ignore[attr-defined]
]
"""Fields of messages that were added to them, and a message that has something there."""


def _of_later_release(message: Any) -> Any:
    """Return the message as plain data with an additional field in it and in all nested messages."""
    if isinstance(message, Request):
        return msgspec.to_builtins(message)
    if isinstance(message, msgspec.Struct):
        values = {name: _of_later_release(getattr(message, name)) for name in message.__struct_fields__}
        if message.__struct_config__.array_like:
            return [*values.values(), *[{"of": "later"}] * isinstance(message, Message)]
        return _tag(message) | values | ({"of_later": {"deep": [1]}} if isinstance(message, Message) else {})
    if isinstance(message, tuple) and not hasattr(message, "_fields"):
        return [_of_later_release(item) for item in message]
    return msgspec.to_builtins(message)


def _tag(message: msgspec.Struct) -> dict[str, Any]:
    config = message.__struct_config__
    return {config.tag_field: config.tag} if config.tag_field is not None else {}


def _of_earlier_release(kind: type[Message], without: str) -> type[msgspec.Struct]:
    """The message's kind as it was before it had that field."""
    fields = [
        (field.name, field.type, *([] if field.required else [msgspec.field(default=field.default)]))
        if field.default_factory is msgspec.NODEFAULT
        else (field.name, field.type, msgspec.field(default_factory=field.default_factory))
        for field in msgspec.structs.fields(kind)
        if field.name != without
    ]
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        fields,
        bases=(Message,),
        frozen=True,
        kw_only=True,
        omit_defaults=True,
        tag=config.tag,
        tag_field=config.tag_field,
    )


@pytest.mark.promise("mixed-versions")
@pytest.mark.parametrize("message", TOLD, ids=lambda message: type(message).__name__)
def test_unknown_fields_of_newer_release_are_ignored(message: Message) -> None:
    plain = _of_later_release(message)
    assert msgspec.json.decode(msgspec.json.encode(plain), type=type(message)) == message
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=type(message)) == message


@pytest.mark.promise("mixed-versions")
@pytest.mark.parametrize(("kind", "name", "message"), ADDED, ids=lambda value: getattr(value, "__name__", None))
def test_added_field_is_ignored_by_old_and_defaulted_by_new(kind: type[Message], name: str, message: Message) -> None:
    earlier = _of_earlier_release(kind, name)
    understood = msgspec.json.decode(msgspec.json.encode(message), type=earlier)
    back = msgspec.json.decode(msgspec.json.encode(understood), type=kind)
    default = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    missing = default.default_factory() if default.default_factory is not msgspec.NODEFAULT else default.default
    assert back == msgspec.structs.replace(message, **{name: missing}) != message


@pytest.mark.parametrize("asked", [SPEC, SpillPlan(every_steps=1, url="/c")], ids=lambda asked: type(asked).__name__)
def test_unknown_field_in_job_spec_is_refused(asked: Request) -> None:
    strange = {**msgspec.to_builtins(asked), "of_later": 1}
    with pytest.raises(msgspec.ValidationError, match="unknown field `of_later`"):
        msgspec.convert(strange, type(asked))


@pytest.mark.promise("mixed-versions")
def test_launcher_with_unknown_job_field_is_refused() -> None:
    joined = msgspec.to_builtins(LauncherJoined(job="j", at=1.0, spec=SPEC, launcher=1, store="n1:8000"))
    joined["spec"]["of_later"] = 1
    with pytest.raises(msgspec.ValidationError, match=r"unknown field `of_later` - at `\$.spec`"):
        msgspec.convert(joined, LauncherJoined)
