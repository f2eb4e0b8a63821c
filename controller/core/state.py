"""What the core knows. Records are stored and come back after a restart; live parts are learned anew.

A record changes only inside ``fleet.handle`` and comes out as a ``Put...`` effect whenever it did. What is kept
per rank and changes every step (progress, seals, acknowledgements) is live: losing it costs at most one version's
commit, and heartbeats bring it back.
"""

from __future__ import annotations

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
    ``findings`` by key are the agent's picture, ``own`` the controller's. ``causes``: keys of findings that must
    clear before a quarantined node may come back; ``needs_operator``: they never do by themselves. ``returns_at``:
    not before this may it leave quarantine. ``evictions``: times of this node's evictions; repeat offenders wait
    longer. ``verdicts`` counts verdicts ever given, for their ids. ``probe``: the one it must pass. ``against``: with
    whom it was in an undecided digest vote. ``condemned``: UUIDs of GPUs (or its name, without any) that computed
    wrongly; when none of them is left, the node is repaired. ``overruled``: key of the finding whose eviction waits
    until its job can spare the node.
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
    own: dict[str, Finding] = {}
    causes: list[str] = []
    needs_operator: bool = False
    returns_at: float = 0.0
    evictions: list[float] = []
    verdicts: int = 0
    probe: str = ""
    probe_passed: bool = False
    probe_failures: int = 0
    against: list[NodeId] = []
    condemned: list[str] = []
    overruled: str = ""


class LauncherRecord(msgspec.Struct, kw_only=True):
    """A node's offer to a job.

    ``able``: false once it could not replace a rank, or stayed silent, until it joins again; ``why_not`` says which.
    ``confirmed``: false from its agent's new life until it joins again.
    """

    node: NodeId
    incarnation: Incarnation
    store: Address
    generation: GenerationNumber = 0
    able: bool = True
    confirmed: bool = True
    why_not: str = ""


class JobRecord(msgspec.Struct, kw_only=True):
    """A job as stored.

    ``generation`` is the current one (None while forming). ``opened_at``: when it was decided; ``resumed_at``: when
    its last rank had stepped, None until then. ``launchers`` in order of joining. ``size``: an operator's bound on
    nodes below ``spec.max_nodes``. ``ceiling``: after corruption nothing newer may be restored, until a version is
    committed after it. ``losses``: per node, wall seconds of rank losses
    inside the flap window; ``leaving``: the running generation while a boundary to ``generation`` is announced and
    not reached. ``excluded``: nodes that this job does without, and why. ``former``: nodes of earlier
    rosters whose vaults may still hold slots. ``raised``: what the training function raised, and on which node first.
    ``ties``: times of unsettled votes. ``finished``: ranks of the running
    generation whose training function returned.
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
    leaving: GenerationSpec | None = None
    opened_at: float = 0.0
    resumed_at: float | None = None
    size: int | None = None
    ceiling: Version | None = None
    retries: int = 0
    raised: dict[str, NodeId] = {}
    losses: dict[NodeId, list[float]] = {}
    excluded: dict[NodeId, str] = {}
    former: list[NodeId] = []
    ties: list[float] = []
    finished: list[Rank] = []


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version: durable from ``committed_at``, and, where digests agreed, clean (``verified_at``)."""

    job: JobId
    version: Version
    committed_at: float
    verified_at: float | None = None
    bytes: int = 0
    ranks: int = 0


# --- live parts: never stored ------------------------------------------------------------------------------------


class Pulse(msgspec.Struct):
    """What beats alone change of a node; rules read it through ``Turn.pulse``.

    ``heard_at``: its last word. ``beats``: clean ones on probation.
    """

    heard_at: float = 0.0
    beats: int = 0


class NodeLive(msgspec.Struct):
    """What is known of a node only while this controller lives.

    ``picture``: it has told its findings in full since we began. ``gone_at``: its connection closed then and nothing
    was heard since. ``watched``: its silence deadline is queued. ``rejoin_due``: until when its launchers may join
    again. ``jobs``: those that ever had a launcher on it.
    """

    pulse: Pulse = msgspec.field(default_factory=Pulse)
    picture: bool = False
    gone_at: float | None = None
    watched: bool = False
    rejoin_due: float | None = None
    jobs: dict[JobId, None] = {}


class Pending(msgspec.Struct, frozen=True):
    """A regrouping that waits until ``due`` for more witnesses: after a failed collective, or after a stall."""

    stall: bool
    since: float
    due: float
    trace: TraceId
    sentence: str


class Ballot(msgspec.Struct):
    """What ranks said of one version: who has sealed it, whose share is kept and safe, digests by group and rank."""

    said: set[Rank] = set()
    safe: set[Rank] = set()
    bytes: dict[Rank, int] = {}
    digests: dict[str, dict[Rank, str]] = {}


class Pace(msgspec.Struct):
    """What beats alone change of a job; rules read it through ``Turn.stride``, ``Turn.progress`` and ``Turn.entered``.

    ``progress`` by rank of the running generation, ``newest_step`` the furthest of it, seen at ``newest_at``.
    ``entered``: ranks seen in the current generation.
    """

    progress: dict[Rank, RankProgress] = {}
    newest_step: int | None = None
    newest_at: float = 0.0
    entered: set[Rank] = set()

    def seen(self, step: int, now: float) -> None:
        """A rank has finished ``step``."""
        if self.newest_step is None or step > self.newest_step:
            self.newest_step, self.newest_at = step, now


class JobLive(msgspec.Struct):
    """What is known of a job only while this controller lives.

    ``resumed``: ranks that have stepped in the current generation; ``slowest``: the one that took longest, with its
    phases. ``witnesses``: ranks whose collective failed. ``stalls``: (step, collectives) by
    rank. ``ballots`` by version, all newer than ``settled``. ``candidate``: the step announced for the next commit
    (None: the first that every rank keeps), looked at again at ``candidate_due`` (0.0: not awaited). ``blind``: times
    of regroupings that named nobody.
    """

    pace: Pace = msgspec.field(default_factory=Pace)
    resumed: set[Rank] = set()
    slowest: tuple[float, Rank, dict[str, float]] | None = None
    witnesses: set[Rank] = set()
    stalls: dict[Rank, tuple[int, int]] = {}
    pending: Pending | None = None
    ballots: dict[Version, Ballot] = {}
    committed: Version | None = None
    verified: Version | None = None
    settled: Version | None = None
    candidate: int | None = None
    candidate_due: float = 0.0
    fallback_at: float = 0.0
    resume_due: float = 0.0
    resume_attempts: int = 0
    blind: list[float] = []


class Probe(msgspec.Struct):
    """A probe under way: who takes part, who is to be judged by it (None: somebody only wants to know)."""

    nodes: tuple[NodeId, ...]
    candidate: NodeId | None
    due: float
    trace: TraceId
    passed: set[NodeId] = set()


class FleetState(msgspec.Struct, kw_only=True):
    """Everything the core knows.

    ``deadlines``: a heap of (due, order, kind, subject); an entry is a hint to look, never a decision. ``silent``:
    reachable nodes over their first deadline or with a closed connection. ``overruled``: nodes whose eviction waits
    until a job can spare them. ``slack_s``: the observer's own lag.
    ``epoch``: which life of a controller over its database this is. ``store_away``: why the database cannot be written
    now, empty while it can.
    ``ignored`` counts what was dropped by rule (stale reports and the like), by reason.
    """

    policy: CorePolicy
    fleet: FleetRecord = msgspec.field(default_factory=FleetRecord)
    nodes: dict[NodeId, NodeRecord] = {}
    jobs: dict[JobId, JobRecord] = {}
    live_nodes: dict[NodeId, NodeLive] = {}
    live_jobs: dict[JobId, JobLive] = {}
    probes: dict[str, Probe] = {}
    deadlines: list[tuple[float, int, str, str]] = []
    queued: set[tuple[float, str, str]] = set()
    order: int = 0
    reachable: set[NodeId] = set()
    silent: set[NodeId] = set()
    overruled: set[NodeId] = set()
    correlated: bool = False
    slack_s: float = 0.0
    slack_at: float = 0.0
    epoch: int = 0
    store_away: str = ""
    ignored: dict[str, int] = {}
