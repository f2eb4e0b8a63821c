"""What goes with a node that is sent to repair: one document for whoever has to mend or replace the hardware."""

from __future__ import annotations

from everstep.ids import NodeId
from everstep.vocabulary import Action, Finding, NodeState, Verdict
from everstep.wire.v1.agent import NO_HOST, Domain, Gpu, Host
from everstep.wire.v1.base import Message

FORMAT = "everstep.evidence/1"


class EvidenceNote(Message, frozen=True, kw_only=True):
    """One thing that happened: a ``finding`` raised or ``cleared``, a ``verdict``, a ``probe``, an ``action``."""

    at: float
    what: str
    sentence: str
    detail: dict[str, str] = {}


class Evidence(Message, frozen=True, kw_only=True):
    """Everything known against a node. Times are wall seconds.

    ``suspects`` are those of ``gpus`` that findings name, with serial number and UUID. ``findings`` stand now, with
    threshold, source and evidence of each; ``history`` tells, oldest first, what stood and was done before.
    ``evictions`` and ``remedied``: when it was taken out, and reset or rebooted; what was only a dry run is in
    ``history`` alone. ``offences``: its score (each weighed by how long ago it was). ``rule`` and ``action``: by what
    it is out, and the cure that is due.
    """

    format: str
    made_at: float
    node: NodeId
    state: NodeState
    since: float
    sentence: str
    rule: str = ""
    action: Action = Action.NONE
    domain: Domain = Domain()
    driver_version: str = ""
    agent_version: str = ""
    boot_id: str = ""
    booted_at: float = 0.0
    gpus: tuple[Gpu, ...] = ()
    host: Host = NO_HOST
    suspects: tuple[Gpu, ...] = ()
    findings: tuple[Finding, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    evictions: tuple[float, ...] = ()
    remedied: tuple[float, ...] = ()
    offences: float = 0.0
    history: tuple[EvidenceNote, ...] = ()
