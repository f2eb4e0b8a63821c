"""What was decided, in lines for people: of transcripts, of a journal, of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

from controller.core.effects import (
    Audit,
    Effect,
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

NAMED_NODES = 8
"""Receivers of a directive that are named; of more, these and how many others."""


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


def digest(words: Iterable[str], effects: Iterable[Effect]) -> int:
    """xxh3-64 of all that is decided: of ``describe``'s words for ``effects``, and of what these leave out."""
    return xxhash.xxh3_64_intdigest("\n".join((*words, *_unsaid(effects))).encode())


def _unsaid(effects: Iterable[Effect]) -> Iterator[str]:
    for effect in effects:
        if isinstance(effect, Send):
            yield f"{effect.node} {type(effect.body).__name__}"
        elif isinstance(effect, PutGeneration):
            yield " ".join(effect.spec.seats)
            yield " ".join(holder.node for holder in effect.spec.holders)
            yield " ".join(_homes(effect))
        elif isinstance(effect, PutNode):
            doc = effect.doc
            yield f"{effect.node} {doc.state} {doc.offences:.6f} {doc.returns_at:.3f} {doc.sentence}"
        elif isinstance(effect, PutJob):
            yield f"{effect.job} {effect.doc.state} {effect.doc.last_number} {' '.join(effect.doc.excluded)}"


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
