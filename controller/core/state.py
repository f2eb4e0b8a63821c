"""What the core knows. Records are stored and come back after a restart; live parts are learned anew.

A record changes only inside ``fleet.handle`` and comes out as a ``Put...`` effect whenever it did. What is kept
per rank and changes every step (progress, seals, acknowledgements) is live: losing it costs at most one version's
commit, and heartbeats bring it back.
"""

from __future__ import annotations

import msgspec

from controller.core.policy import CorePolicy
from controller.core.rules import Reports, SecondPass, Steps
from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Action, Finding, GenerationReason, JobState, NodeState, ProbeKind
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.training import GenerationSpec, JobSpec, RankProgress


class Window(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Maintenance until ``until`` (wall seconds) of a node, or of a rack's nodes but those in ``without``, which were
    readmitted early; ``sentence`` says by whose order."""

    until: float
    sentence: str
    node: NodeId = ""
    rack: str = ""
    without: tuple[NodeId, ...] = ()


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic eviction, and whose budgets it uses: of ``rack`` (empty: none), of ``jobs`` with a seat there."""

    at: float
    node: NodeId
    rack: str = ""
    jobs: tuple[JobId, ...] = ()


class FleetRecord(msgspec.Struct, kw_only=True):
    """What belongs to no single node or job.

    ``breaker``: the sentence of a latched eviction breaker, empty while evictions are allowed. ``evicted``: the
    evictions inside the budget's window, oldest first. ``probes`` counts probes ever asked for, so that ids are new;
    ``remedies`` the same. ``remedied``: wall seconds of automatic resets and reboots inside their window.
    ``maintenance``: windows that are not over.
    """

    breaker: str = ""
    breaker_at: float = 0.0
    evicted: list[Eviction] = []
    probes: int = 0
    remedies: int = 0
    remedied: list[float] = []
    maintenance: list[Window] = []


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a node's case book: a finding, verdict, probe or action, and when."""

    at: float
    what: str
    sentence: str
    detail: dict[str, str] = {}


class Course(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a node that is out is treated.

    ``rule``: id of the rule that took it out. ``ladder`` and ``rung``: its cures, and which is due. ``checks``: what it
    must pass on its way back, ``passes`` times in a row; ``left``: what is still to be passed, ``alone``: it had no
    partner for what takes one. ``clear_s``: for how long its causes must be clear. ``remedy``: id of the action that
    was asked for and not reported, ``remedy_due``: when it is given up. ``settles_at``: when the causes must have
    cleared after a confirmed one. ``hindered``: why no action was asked for, as it was last said.
    """

    rule: str = ""
    ladder: tuple[Action, ...] = ()
    rung: int = 0
    checks: tuple[ProbeKind, ...] = (ProbeKind.ALL_REDUCE,)
    passes: int = 1
    left: list[ProbeKind] = []
    alone: bool = False
    clear_s: float = 0.0
    remedy: str = ""
    remedy_due: float = 0.0
    settles_at: float = 0.0
    hindered: str = ""


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node as stored.

    ``since`` and ``sentence``: when and why it came into ``state``. ``reachable``: it was heard within its deadlines.
    ``findings`` by key are the agent's picture, ``own`` the controller's. ``causes``: keys of findings that must
    clear before a quarantined node may come back; ``needs_operator``: they never do by themselves. ``returns_at``:
    not before this may it leave quarantine. ``evictions``: times of this node's evictions; repeat offenders wait
    longer. ``verdicts`` counts verdicts ever given, for their ids. ``probe``: the one it must pass. ``against``: with
    whom it was in an undecided digest vote. ``condemned``: UUIDs of GPUs (or its name, without any) that computed
    wrongly; when none of them is left, the node is repaired. ``overruled``: key of the finding whose eviction is
    held, ``held_by`` what holds it (a scope of ``eviction``).

    ``booted_at``: when it was first seen after its last boot. ``reports`` of a finding are counted under its rule and
    key, ``steps`` of ladders under the rule. ``undecided``: keys of findings that are looked at again, and what for.
    ``cleared``: since when a cause has been clear. ``course``: its treatment while it is out. ``offences``: its score
    as of ``offended_at``. ``remedied``: times of its automatic resets and reboots. ``cordoned``: id of the
    remedy by which Everstep took it out of service with the scheduler; ``foreign``: who else has. ``hold``: a person's
    order that keeps it out. ``maintenance_until``: the end of its maintenance window, 0.0 outside one. ``notes``: its
    case book.
    """

    node: NodeId
    incarnation: Incarnation
    vault: Address
    domain: Domain = Domain()
    labels: dict[str, str] = {}
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
    held_by: str = ""
    booted_at: float = 0.0
    reports: dict[str, Reports] = {}
    steps: dict[str, Steps] = {}
    undecided: dict[str, str] = {}
    cleared: dict[str, float] = {}
    course: Course | None = None
    offences: float = 0.0
    offended_at: float = 0.0
    remedied: list[float] = []
    cordoned: str = ""
    foreign: str = ""
    hold: str = ""
    maintenance_until: float = 0.0
    notes: list[Note] = []


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


class Share(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where else the part of a version is that a node's ranks stored.

    ``copies``: nodes that each hold all of what these ranks alone hold. ``alike``: nodes that store the rest again,
    each of them a part of it.
    """

    copies: tuple[NodeId, ...] = ()
    alike: tuple[NodeId, ...] = ()


class Homes(msgspec.Struct, frozen=True):
    """Which nodes hold the versions that were committed in ``generation``: a share for each node of its roster."""

    generation: GenerationNumber
    shares: dict[NodeId, Share]


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
    generation whose training function returned. ``slow``: nodes that were replaced as stragglers, and why. ``homes`` of
    the newest committed version. ``gave_at``: when it last gave a node to a job of higher priority.
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
    slow: dict[NodeId, str] = {}
    homes: Homes | None = None
    gave_at: float = 0.0


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

    ``heard_at``: its last word; 0.0 before the first that this controller hears. ``beats``: clean ones on probation.
    ``longest_s``: its longest pause between two words, of lately.
    """

    heard_at: float = 0.0
    beats: int = 0
    longest_s: float = 0.0


class Hearing(msgspec.Struct):
    """How well this controller listens: ``last_at`` somebody was heard; ``since`` then it was not deaf for long. No
    node's silence began before."""

    last_at: float = 0.0
    since: float = 0.0


class Burst(msgspec.Struct):
    """How many findings of a kind came without a pause, and when the last one did."""

    count: int = 0
    at: float = 0.0


class NodeLive(msgspec.Struct):
    """What is known of a node only while this controller lives.

    ``picture``: it has told its findings in full since we began. ``gone_at``: its connection closed then and nothing
    was heard since. ``watched``: its silence deadline is queued. ``rejoin_due``: until when its launchers may join
    again. ``jobs``: those that ever had a launcher on it. ``accusers``: nodes whose vaults lost its vault, and when;
    void once it is heard after that. ``bursts``: by kind and severity of findings.
    """

    pulse: Pulse = msgspec.field(default_factory=Pulse)
    picture: bool = False
    gone_at: float | None = None
    watched: bool = False
    rejoin_due: float | None = None
    jobs: dict[JobId, None] = {}
    accusers: dict[NodeId, float] = {}
    bursts: dict[str, Burst] = {}


class Pending(msgspec.Struct, frozen=True):
    """A regrouping that waits until ``due`` for more witnesses: after a failed collective, or after a stall; or, with a
    ``reason``, for members that a controller which has just begun has not heard yet."""

    stall: bool
    since: float
    due: float
    trace: TraceId
    sentence: str
    reason: GenerationReason | None = None


class Ballot(msgspec.Struct):
    """What ranks said of one version: who has sealed it, whose share is kept and safe, digests by group and rank.

    ``copies`` and ``alike`` as in ``Share``, by node.
    """

    said: set[Rank] = set()
    safe: set[Rank] = set()
    copies: dict[NodeId, dict[NodeId, None]] = {}
    alike: dict[NodeId, dict[NodeId, None]] = {}
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
    of regroupings that named nobody. ``committed_at``: when ``committed`` was. ``slow``: for each node of which a rank
    was slow lately, numbers of the windows in which one was; ``window`` is the newest, looked at again at
    ``window_due`` (0.0: not awaited). ``inherited``: its generation had not resumed when this controller began;
    ``first_step`` is the furthest step then. ``gather_due``: until when others
    that come back are waited for before the job grows (0.0: nobody came yet).
    """

    pace: Pace = msgspec.field(default_factory=Pace)
    resumed: set[Rank] = set()
    slowest: tuple[float, Rank, dict[str, float]] | None = None
    witnesses: set[Rank] = set()
    stalls: dict[Rank, tuple[int, int]] = {}
    pending: Pending | None = None
    ballots: dict[Version, Ballot] = {}
    committed: Version | None = None
    committed_at: float = 0.0
    verified: Version | None = None
    settled: Version | None = None
    slow: dict[NodeId, list[int]] = {}
    window: int = 0
    window_due: float = 0.0
    candidate: int | None = None
    candidate_due: float = 0.0
    fallback_at: float = 0.0
    resume_due: float = 0.0
    gather_due: float = 0.0
    resume_attempts: int = 0
    inherited: bool = False
    first_step: int | None = None
    blind: list[float] = []


class Probe(msgspec.Struct):
    """A probe under way: who takes part, who is to be judged by it (None: somebody only wants to know).

    ``case``: the second pass that it belongs to.
    """

    nodes: tuple[NodeId, ...]
    candidate: NodeId | None
    due: float
    trace: TraceId
    passed: set[NodeId] = set()
    kind: ProbeKind = ProbeKind.ALL_REDUCE
    case: str = ""


class Case(msgspec.Struct, kw_only=True):
    """A second pass under way: whose fault is it?

    ``findings``: of each suspect, what it is suspected of. ``what``: the same in a sentence. ``tries``: probes begun of
    each suspect. ``failed``, ``passed``, ``unknown``: how it ended for each, with the words of it. ``due``: when those
    without an end count as unknown. ``job``: whose ranks' digests differed, empty for pairs.
    """

    kind: SecondPass
    suspects: tuple[NodeId, ...]
    findings: dict[NodeId, Finding]
    what: str
    due: float
    trace: TraceId
    job: str = ""
    tries: dict[NodeId, int] = {}
    failed: dict[NodeId, str] = {}
    passed: dict[NodeId, str] = {}
    unknown: dict[NodeId, str] = {}


class Tally(msgspec.Struct):
    """Of nodes with something in common: how many are ``expected`` (reachable), and how many of these ``silent``."""

    expected: int = 0
    silent: int = 0


class Episode(msgspec.Struct):
    """So many are silent at once that the network or this controller is suspected: ``since`` when, ``most`` at once."""

    since: float
    most: int = 0
    said: bool = False


class FleetState(msgspec.Struct, kw_only=True):
    """Everything the core knows.

    ``deadlines``: a heap of (due, order, kind, subject); an entry is a hint to look, never a decision. ``silent``:
    reachable nodes over their first deadline or with a closed connection. ``tallies`` count both by what nodes have in
    common, ``crossed`` names those of them that are silent at once, in an ``episode``; ``calm_since``: when the last
    one ended. ``unmet``: reachable nodes that this controller has not heard; until ``reunion_at`` they are waited for.
    ``held``: nodes whose eviction is held, by what holds it; ``short``: jobs that can spare no node: until when that is
    taken as known, and why. ``slack_s``: the observer's own lag. ``cases``: second passes under way.
    ``partnerless_until``: until then no node is free to be a partner in a probe. ``sightings``: where and when each
    kind of finding (and XID) was seen lately; ``outbreaks``: those of them taken for no node's own.
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
    cases: dict[str, Case] = {}
    partnerless_until: float = 0.0
    sightings: dict[str, dict[NodeId, float]] = {}
    outbreaks: set[str] = set()
    deadlines: list[tuple[float, int, str, str]] = []
    queued: set[tuple[float, str, str]] = set()
    order: int = 0
    reachable: set[NodeId] = set()
    silent: set[NodeId] = set()
    tallies: dict[str, Tally] = {}
    crossed: set[str] = set()
    episode: Episode | None = None
    calm_since: float = 0.0
    unmet: set[NodeId] = set()
    reunion_at: float = 0.0
    held: dict[str, dict[NodeId, None]] = {}
    short: dict[JobId, tuple[float, str]] = {}
    hearing: Hearing = msgspec.field(default_factory=Hearing)
    slack_s: float = 0.0
    slack_at: float = 0.0
    epoch: int = 0
    store_away: str = ""
    ignored: dict[str, int] = {}
