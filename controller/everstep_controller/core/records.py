"""What the core knows and stores: records that come back after a restart.

A record changes only inside ``fleet.handle`` and comes out as a ``Put...`` effect whenever it did.
"""

from __future__ import annotations

import msgspec

from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, Rank, TraceId, Version
from everstep.vocabulary import Action, Finding, JobState, NodeState, ProbeKind
from everstep.wire.v1.agent import NO_HOST, Domain, Gpu, Host
from everstep.wire.v1.training import GenerationSpec, JobSpec
from everstep.wire.v1.vault_orders import Protection
from everstep_controller.core.policy import Reports, Steps


class Window(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Maintenance until ``until`` (wall seconds) of a node, or of a rack's nodes but those in ``without``, which were
    readmitted early; ``sentence`` says by whose order. ``starts_at``: when it begins, 0.0 once it has."""

    until: float
    starts_at: float = 0.0
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


class Unfit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a node that was forgotten while it was not fit to serve: why, what it had to pass on its way back
    (as in ``Course``), and which of its GPUs computed wrongly (as ``NodeRecord.condemned``)."""

    sentence: str
    checks: tuple[ProbeKind, ...] = ()
    passes: int = 1
    condemned: tuple[str, ...] = ()


class FleetRecord(msgspec.Struct, kw_only=True):
    """What belongs to no single node or job.

    ``breaker``: the sentence of a latched eviction breaker, empty while evictions are allowed; ``latched_by``: the node
    whose eviction was one too many, and the key of the finding it was for. ``evicted``: the
    evictions inside the budget's window, oldest first. ``probes`` counts probes ever asked for, so that ids are new;
    ``remedies`` the same. ``remedied``: wall seconds of automatic resets and reboots inside their window,
    ``restarted`` of restarts of ranks. ``maintenance``: windows that are not over, planned ones too. ``unfit``: by name
    what was forgotten of nodes that must not come back as if nothing had been, oldest first. ``outbreaks``: since when
    each outbreak (``outbreaks``) stands, in wall seconds.
    """

    breaker: str = ""
    breaker_at: float = 0.0
    latched_by: tuple[str, str] = ("", "")
    evicted: list[Eviction] = []
    probes: int = 0
    remedies: int = 0
    remedied: list[float] = []
    restarted: list[float] = []
    maintenance: list[Window] = []
    unfit: dict[NodeId, Unfit] = {}
    outbreaks: dict[str, float] = {}


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a node's case book: a finding, verdict, probe or action, and when."""

    at: float
    what: str
    sentence: str
    detail: dict[str, str] = {}


class Course(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a node that is out is treated.

    ``rule``: id of the rule that took it out. ``ladder`` and ``rung``: its cures, and which is due. ``checks``: what it
    must pass on its way back (empty: an all-reduce), ``passes`` times in a row; ``left``: what is still to be passed,
    ``alone``: it had no partner for what takes one. ``clear_s``: for how long its causes must be clear. ``remedy``: id
    of the action that was asked for and not reported, ``remedy_due``: when it is given up. ``settles_at``: when the
    causes must have cleared after a confirmed one. ``hindered``: why no action was asked for, as it was last said.
    ``offence``: what was held against it for being out. ``evicted_at``: when it was evicted, or found ill before it
    served, 0.0 where it is out otherwise; ``signs``: of what signature (``outbreaks``)
    each cause is that was known since then, cleared ones too; ``reserve_s``: for how long after it one of them may turn
    out to be an outbreak's.
    """

    rule: str = ""
    ladder: tuple[Action, ...] = ()
    rung: int = 0
    checks: tuple[ProbeKind, ...] = ()
    passes: int = 1
    left: list[ProbeKind] = []
    alone: bool = False
    clear_s: float = 0.0
    remedy: str = ""
    remedy_due: float = 0.0
    settles_at: float = 0.0
    hindered: str = ""
    offence: float = 0.0
    evicted_at: float = 0.0
    signs: dict[str, str] = {}
    reserve_s: float = 0.0


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node as stored.

    ``since`` and ``sentence``: when and why it came into ``state``. ``reachable``: it was heard within its deadlines;
    ``lost_at``: when it last ceased to be; ``lost``: times of losses that were its own, inside ``node_flap_window_s``.
    ``findings`` by key are the agent's picture, ``own`` the controller's; ``own_until``: when those of them that nobody
    clears are over, unless they are seen again. ``causes``: keys of findings that must
    clear before a quarantined node may come back; ``needs_operator``: they never do by themselves. ``returns_at``:
    not before this may it leave quarantine. ``evictions``: times of this node's evictions; repeat offenders wait
    longer. ``verdicts`` counts verdicts ever given, for their ids; ``stands_by``: the one by which it is out, or back.
    ``probe``: the one it must pass. ``against``: with whom it was in an undecided digest vote, at ``against_at``.
    ``condemned``: UUIDs of GPUs (or its name, without any) that computed wrongly; when none of them is left, the node
    is repaired.
    ``vouched``: keys of findings that stood when an operator readmitted it, and did not get worse.
    ``shown_at``: when findings that wait for the end of an outbreak, or whose eviction is held, were shown last.
    ``overruled``: key of the finding whose eviction is held, ``held_by`` what holds it (a scope of ``eviction``).

    ``booted_at``: when it was first seen after its last boot. ``reports`` of a finding are counted under its rule and
    key, ``steps`` of ladders under the rule. ``undecided``: keys of findings that are looked at again, and what for.
    ``cleared``: since when a cause has been clear. ``course``: its treatment while it is out. ``offences``: its score
    as of ``offended_at``, ``offended`` those of the last half-life, each with when it was and what it weighs.
    ``remedied``: times of its automatic resets and reboots, ``dry_runs`` of those that were only written to the log,
    ``restarted`` of restarts of its ranks. ``cordoned``: id of the remedy by which Everstep took it out of service with
    the scheduler, or ``remedies.PERHAPS``; ``foreign``: who else has. ``hold``: a person's order that keeps it out.
    ``maintenance_until``: the end of its maintenance window, 0.0 outside one. ``notes``: its case book.
    """

    node: NodeId
    incarnation: Incarnation
    vault: Address
    domain: Domain = Domain()
    labels: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()
    host: Host = NO_HOST
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
    lost_at: float = 0.0
    lost: list[float] = []
    findings: dict[str, Finding] = {}
    own: dict[str, Finding] = {}
    own_until: dict[str, float] = {}
    causes: list[str] = []
    needs_operator: bool = False
    returns_at: float = 0.0
    evictions: list[float] = []
    verdicts: int = 0
    stands_by: str = ""
    probe: str = ""
    probe_failures: int = 0
    against: list[NodeId] = []
    against_at: float = 0.0
    condemned: list[str] = []
    vouched: list[str] = []
    shown_at: dict[str, float] = {}
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
    offended: list[tuple[float, float]] = []
    remedied: list[float] = []
    dry_runs: list[float] = []
    restarted: list[float] = []
    cordoned: str = ""
    foreign: str = ""
    hold: str = ""
    maintenance_until: float = 0.0
    notes: list[Note] = []

    def known(self) -> tuple[Finding, ...]:
        """What stands: as its agent tells, and as the controller found itself."""
        return (*self.findings.values(), *self.own.values())

    def finding(self, key: str) -> Finding | None:
        """The one of that key, whoever found it."""
        return self.findings.get(key) or self.own.get(key)


class LauncherRecord(msgspec.Struct, kw_only=True):
    """A node's offer to a job.

    ``able``: false once it could not replace a rank, or its ranks did not enter a generation in time, until it joins
    again; ``why_not`` says which. ``missing``: local ranks that did not enter, until another process has their place;
    ``late``: in how many of its generations in a row there were such.
    ``confirmed``: false from its agent's new life until it joins again.
    """

    node: NodeId
    incarnation: Incarnation
    store: Address
    generation: GenerationNumber = 0
    able: bool = True
    confirmed: bool = True
    why_not: str = ""
    missing: list[int] = []
    late: int = 0


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


class Spilling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version on its way to storage: under ``url``, from the slots of ``writers``, each of which writes the shares of
    these ranks. ``attempt``: number of the order; an answer to another one is void.
    ``failures``: answers that said that it could not be done now, with the last one's ``trouble``."""

    version: Version
    url: str
    writers: dict[NodeId, tuple[Rank, ...]]
    begun_at: float
    bytes: int = 0
    attempt: int = 0
    failures: int = 0
    trouble: str = ""
    trace: TraceId = ""


class StoredCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version that is whole on storage, in the folder at ``url``. ``suspect``: it may be corrupt."""

    version: Version
    url: str
    bytes: int
    begun_at: float
    at: float
    suspect: bool = False


class Protecting(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version whose parity is being made. ``on_copies``: where else the shares are that no group takes. ``failures``
    as in ``Spilling``."""

    protection: Protection
    begun_at: float
    on_copies: dict[NodeId, Share] = {}
    failures: int = 0
    trace: TraceId = ""


class Shielded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version that is kept by parity since ``at``."""

    protection: Protection
    at: float
    on_copies: dict[NodeId, Share] = {}


class JobRecord(msgspec.Struct, kw_only=True):
    """A job as stored.

    ``paused_for``: what paused it last. ``generation`` is the current one (None while forming). ``opened_at``: when it
    was decided; ``resumed_at``: when its last rank had stepped, None until then. ``launchers`` in order of joining.
    ``size``: an operator's bound on nodes below ``spec.max_nodes``. ``ceiling``: after corruption nothing newer may be
    restored, until a version is committed after it. ``losses``: per node, wall seconds of rank losses inside the flap
    window; ``leaving``: the running generation while a boundary to ``generation`` is announced and not reached.
    ``excluded``: nodes that this job does without, and why. ``former``: nodes of earlier rosters whose vaults may still
    hold slots. ``raised``: what the training function raised, and on which node first. ``ties``: times of unsettled
    votes. ``finished``: ranks of the running generation whose training function returned. ``slow``: nodes that were
    replaced as stragglers, and why. ``homes`` of the newest committed version. ``gave_at``: when it last gave a node to
    a job of higher priority. ``deserted_at``: when the last of its launchers was gone.
    ``ended_step``: the last step of a job that is over.
    ``last_begun``: the last step that the finished ranks began, None where it is not known.

    ``spilling``: the version on its way to storage. ``stored``: those that are there, by when they were written;
    ``spilled_step`` of the last one. ``spills_lost``: versions that were ordered and never got there;
    ``spill_failures`` of them in a row, the last for ``spill_trouble``, and none is ordered before
    ``spill_not_before``.

    ``shielded``: the version that is kept by parity; ``protecting``: the next one. ``parity_sentence``: how groups were
    formed last. ``protect_failures``, ``protect_trouble`` and ``protect_not_before`` as those of spills.
    """

    job: JobId
    spec: JobSpec
    secret: str
    created_at: float
    state: JobState = JobState.FORMING
    since: float = 0.0
    sentence: str = ""
    paused_for: str = ""
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
    last_begun: int | None = None
    slow: dict[NodeId, str] = {}
    homes: Homes | None = None
    gave_at: float = 0.0
    deserted_at: float = 0.0
    ended_step: int = 0
    spilling: Spilling | None = None
    stored: list[StoredCheckpoint] = []
    spilled_step: int = 0
    spills_lost: int = 0
    spill_failures: int = 0
    spill_trouble: str = ""
    spill_not_before: float = 0.0
    shielded: Shielded | None = None
    protecting: Protecting | None = None
    parity_sentence: str = ""
    protect_failures: int = 0
    protect_trouble: str = ""
    protect_not_before: float = 0.0


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version: durable from ``committed_at``, and, where digests agreed, clean (``verified_at``)."""

    job: JobId
    version: Version
    committed_at: float
    verified_at: float | None = None
    bytes: int = 0
    ranks: int = 0


# ---- casebook
# What is remembered of a node beside the audit log: enough for whoever has to mend it.

MOST_NOTES = 48
"""Entries kept of a node; older ones are in the audit log."""


def enter(record: NodeRecord, at: float, what: str, sentence: str, detail: dict[str, str] | None = None) -> None:
    """One more entry. The caller says that the record has changed."""
    note = Note(at=at, what=what, sentence=sentence, detail=detail or {})
    record.notes = [*record.notes[1 - MOST_NOTES :], note]
