"""What was decided, in lines for people: of transcripts, of a journal, of a replay; and a digest of all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import xxhash

from controller.core.effects import (
    Audit,
    Effect,
    PutFleet,
    PutGeneration,
    PutJob,
    PutNode,
    PutVerdict,
    PutVersion,
    RequestRemedy,
    Send,
)
from everstep.wire.v1.directives import (
    KillRank,
    NewGeneration,
    ProtectVersion,
    RunProbe,
    SpillVersion,
    StopJob,
    VersionNotice,
)
from everstep.wire.v1.training import GenerationSpec

NAMED_NODES = 8
"""Receivers of a directive that are named; of more, these and how many others."""
_encode = msgspec.msgpack.Encoder().encode


def describe(effects: Iterable[Effect]) -> Iterator[str]:
    """One line per decision; one per directive, with all who are sent it."""
    sends: dict[str, list[str]] = {}
    for effect in effects:
        if isinstance(effect, PutGeneration):
            yield f"generation {effect.spec.number} ({effect.spec.reason}): {effect.spec.sentence}"
            yield f"  restore {_rule(effect)}; store on {effect.spec.store_node}; copies {_copies(effect)}"
        elif isinstance(effect, PutVerdict):
            yield f"verdict {effect.verdict.id} ({effect.verdict.decision}): {effect.verdict.sentence}"
        elif isinstance(effect, PutVersion):
            clean = ", verified" if effect.doc.verified_at is not None else ""
            yield f"version {effect.doc.version} committed{clean}"
        elif isinstance(effect, RequestRemedy):
            yield f"remedy {effect.remedy.id} ({effect.remedy.kind} {effect.remedy.node}): {effect.remedy.sentence}"
        elif isinstance(effect, Audit) and effect.entry.kind != "generation" and not _is_verdict(effect):
            yield f"{effect.entry.kind}: {effect.entry.sentence}"
        elif isinstance(effect, Send):
            sends.setdefault(_directive(effect), []).append(effect.node)
    for directive, nodes in sends.items():
        yield f"to {_several(nodes, ' ')}: {directive}"


def digest(effects: Iterable[Effect]) -> int:
    """xxh3-64 of all that is decided, of what ``describe`` leaves out too: whole directives, evidence, GPUs to reset.

    Not of jobs' secrets, which no journal keeps; of records only of what is a judgement, since they have more fields in
    each release.
    """
    hashed, sent = xxhash.xxh3_64(), None
    for effect in effects:
        if isinstance(effect, Send) and effect.body == sent:  # one directive for a whole job is encoded once
            hashed.update(effect.node.encode() + b"\0")
        else:
            hashed.update(_encode(_decided(effect)))
        sent = effect.body if isinstance(effect, Send) else None
    return hashed.intdigest()


def _decided(effect: Effect) -> object:
    match effect:
        case PutFleet():
            return effect.doc.breaker
        case PutNode(doc=node):
            held = node.hold, node.foreign, node.held_by, node.maintenance_until
            way_back = node.action, node.causes, node.course, node.returns_at, node.offences
            return effect.node, node.state, node.sentence, held, way_back
        case PutJob(doc=job):
            return effect.job, job.state, job.last_number, list(job.excluded), job.ceiling, job.size
        case PutGeneration():
            return _without_secret(effect.spec)
        case Send(body=NewGeneration(spec=spec)):
            return effect.node, _without_secret(spec)
    return effect


def _without_secret(spec: GenerationSpec) -> GenerationSpec:
    return msgspec.structs.replace(spec, secret="")


def _is_verdict(effect: Audit) -> bool:
    return effect.entry.kind.startswith("verdict.")


def _several(names: list[str], joint: str) -> str:
    if len(names) <= NAMED_NODES:
        return joint.join(names)
    return f"{joint.join(names[:NAMED_NODES])}{joint}and {len(names) - NAMED_NODES} more"


def _rule(effect: PutGeneration) -> str:
    rule = effect.spec.restore
    bounds = [f"from {rule.floor}" if rule.floor else "", f"up to {rule.ceiling}" if rule.ceiling else ""]
    return "nothing" if rule.scratch else " ".join(filter(None, bounds)) or "the newest whole version"


def _copies(effect: PutGeneration) -> str:
    return _several(_homes(effect), " ")


def _homes(effect: PutGeneration) -> list[str]:
    return [f"{node}->{'+'.join(to) or '-'}" for node, to in effect.spec.replica_nodes.items()]


def _directive(effect: Send) -> str:
    body = effect.body
    match body:
        case NewGeneration():
            return f"new generation {body.spec.number} of {body.spec.job}"
        case KillRank():
            return f"kill rank {body.rank} of generation {body.generation}"
        case StopJob():
            return f"stop {body.job}, {'well' if body.ok else 'failed'}: {body.reason}"
        case VersionNotice():
            so_far = f"committed {body.committed}" if body.committed else "nothing committed yet"
            return so_far if body.candidate is None else f"{so_far}, next after step {body.candidate}"
        case SpillVersion():
            return f"write {body.version} to {body.url}"
        case ProtectVersion():
            return f"make parity of {body.version}, {len(body.groups)} shards"
        case RunProbe():
            return f"run {body.probe} among {' '.join(body.nodes)}"
