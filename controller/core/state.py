"""What the core knows. Records are stored and come back after a restart; live parts are learned anew.

A record changes only inside ``fleet.handle`` and comes out as a ``Put...`` effect whenever it did. What is kept
per rank and changes every step (progress, seals, acknowledgements) is live: losing it costs at most one version's
commit, and heartbeats bring it back.
"""

from __future__ import annotations

from typing import Any

import msgspec

from controller.core.policy import CorePolicy
from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Action, Finding, JobState, NodeState
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.training import GenerationSpec, JobSpec, RankProgress


class FleetRecord(msgspec.Struct, kw_only=True):
    """What belongs to no single node or job.

    ``breaker``: the sentence of a latched eviction breaker, empty while evictions are allowed. ``evictions``: wall
    seconds of the evictions inside the budget's window. ``probes`` counts probes ever asked for, so that ids are new.
    """

    breaker: str = ""
    breaker_at: float = 0.0
    evictions: list[float] = []
    probes: int = 0


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node as stored.

    ``since`` and ``sentence``: when and why it came into ``state``. ``reachable``: it was heard within its deadlines.
    ``findings`` by key. ``causes``: keys of findings that must clear before a quarantined node may come back;
    ``needs_operator``: they never clear by themselves. ``verdicts`` counts verdicts ever given, for their ids.
    ``evictions``: wall seconds of this node's evictions; repeat offenders wait longer. ``returns_at``: not before
    this may it leave quarantine. ``probe``: the probe it must pass, or passed. ``against``: with whom it was in an
    undecided digest vote.
    """

    node: NodeId
    incarnation: Incarnation
    vault: Address
    domain: Domain = Domain()
    gpus: tuple[Gpu, ...] = ()
    agent_version: str = ""
    driver_version: str = ""
    boot_id: str = ""
    registered_at: float = 0.0
    state: NodeState = NodeState.HEALTHY
    since: float = 0.0
    sentence: str = ""
    trace: TraceId = ""
    action: Action = Action.NONE
    reachable: bool = True
    findings: dict[str, Finding] = {}
    causes: list[str] = []
    needs_operator: bool = False
    returns_at: float = 0.0
    evictions: list[float] = []
    verdicts: int = 0
    probe: str = ""
    probe_passed: bool = False
    probe_failures: int = 0
    beats: int = 0
    against: list[NodeId] = []


class LauncherRecord(msgspec.Struct, kw_only=True):
    """A node's offer to a job.

    ``able``: false once it could not replace a rank, or stayed silent, until it joins again; ``why_not`` says which.
    ``confirmed``: false from its agent's new life until it joins again.
    """

    node: NodeId
    incarnation: Incarnation
    store: Address
    joined_at: float
    generation: GenerationNumber = 0
    able: bool = True
    confirmed: bool = True
    why_not: str = ""


class JobRecord(msgspec.Struct, kw_only=True):
    """A job as stored.

    ``generation`` is the current one (None while forming). ``opened_at``: when it was decided; ``resumed_at``: when
    its last rank had stepped, None until then. ``launchers`` in order of joining. ``size``: an operator's bound on
    nodes below ``spec.max_nodes``. ``ceiling``: after corruption nothing newer may be restored, until a version is
    committed after it. ``scratch``: nothing stored may be restored. ``losses``: per node, wall seconds of rank losses
    inside the flap window; ``excluded``: nodes that this job does without, and why. ``former``: nodes of earlier
    rosters whose vaults may still hold slots. ``finished``: ranks of the current generation whose
    training function returned.
    """

    job: JobId
    spec: JobSpec
    secret: str
    created_at: float
    state: JobState = JobState.FORMING
    since: float = 0.0
    sentence: str = ""
    trace: TraceId = ""
    launchers: dict[NodeId, LauncherRecord] = {}
    last_number: GenerationNumber = 0
    generation: GenerationSpec | None = None
    opened_at: float = 0.0
    resumed_at: float | None = None
    size: int | None = None
    ceiling: Version | None = None
    scratch: bool = False
    retries: int = 0
    losses: dict[NodeId, list[float]] = {}
    excluded: dict[NodeId, str] = {}
    former: list[NodeId] = []
    finished: list[Rank] = []


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is durable (``committed_at``), and, where digests agreed, clean (``verified_at``)."""

    job: JobId
    version: Version
    committed_at: float
    verified_at: float | None = None
    bytes: int = 0
    ranks: int = 0


# --- live parts: never stored ------------------------------------------------------------------------------------


class NodeLive(msgspec.Struct):
    """What is known of a node only while this controller lives.

    ``heard_at``: its last word. ``picture``: it has told its findings in full since we began. ``gone_at``: its
    connection closed then and nothing was heard since. ``watched``: a liveness deadline is queued. ``jobs``: jobs
    with a launcher on it.
    """

    heard_at: float
    picture: bool = False
    gone_at: float | None = None
    watched: bool = False
    recheck: bool = False
    jobs: set[JobId] = msgspec.field(default_factory=set)


class Pending(msgspec.Struct):
    """A regrouping that waits a moment for more witnesses. ``what``: 'collective' or 'stall'."""

    what: str
    since: float
    due: float
    trace: TraceId
    sentence: str


class Ballot(msgspec.Struct):
    """What ranks said of one version: who holds it safely, and the digests by group and rank."""

    safe: set[Rank] = msgspec.field(default_factory=set)
    said: set[Rank] = msgspec.field(default_factory=set)
    bytes: int = 0
    digests: dict[str, dict[Rank, str]] = msgspec.field(default_factory=dict)
    judged: bool = False


class JobLive(msgspec.Struct):
    """What is known of a job only while this controller lives."""

    progress: dict[Rank, RankProgress] = msgspec.field(default_factory=dict)
    newest_step: int = 0
    entered: set[Rank] = msgspec.field(default_factory=set)
    resumed: set[Rank] = msgspec.field(default_factory=set)
    restored: Version | None = None
    slowest: tuple[float, Rank, dict[str, float]] | None = None
    witnesses: dict[Rank, float] = msgspec.field(default_factory=dict)
    stalls: dict[Rank, tuple[int, int]] = msgspec.field(default_factory=dict)
    pending: Pending | None = None
    ballots: dict[Version, Ballot] = msgspec.field(default_factory=dict)
    committed: Version | None = None
    verified: Version | None = None
    noticed: tuple[Version | None, Version | None] = (None, None)
    noticed_at: float = 0.0
    draining: GenerationSpec | None = None
    fallback_at: float = 0.0
    resume_due: float = 0.0
    resume_attempts: int = 0
    blind: list[float] = msgspec.field(default_factory=list)


class FleetState:
    """Everything. ``ignored`` counts what was dropped by rule (stale reports and the like), by its reason.

    ``deadlines`` is a heap of (due, order, kind, subject); an entry is a hint to look, never a decision.
    """

    def __init__(self, policy: CorePolicy) -> None:
        self.policy = policy
        self.fleet = FleetRecord()
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.jobs: dict[JobId, JobRecord] = {}
        self.live_nodes: dict[NodeId, NodeLive] = {}
        self.live_jobs: dict[JobId, JobLive] = {}
        self.deadlines: list[tuple[float, int, str, str]] = []
        self.order = 0
        self.slack_s = 0.0
        self.slack_at = 0.0
        self.silent: set[NodeId] = set()
        self.ignored: dict[str, int] = {}
        self.probes: dict[str, Any] = {}
