"""The knobs of every decision, each with its unit, its reason and what either direction costs."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Finding, FindingKind, Mode, ProbeKind, Severity

# ---- rules
# The shape of a rule on findings: when it judges, how strictly, what cures, and when it is over.
#
# The agent's own policy turns samples into findings. A rule here is about findings across time and nodes: how often
# before it counts, on how many nodes before it is somebody else's fault, which cure after which.

LADDER_ACTIONS = (Action.RESTART_RANK, Action.DRAIN, Action.RESET_GPU, Action.REBOOT_NODE, Action.REPAIR)
"""What a ladder may be made of, weakest first. DRAIN: out of service until it clears by itself."""

MAX_REMEMBERED = 16
"""Most reports of one finding, and most steps of one ladder, that are remembered of a node."""

ReportHistory = list[tuple[float, bool]]
"""When, and whether it was bad; oldest first."""

LadderHistory = list[tuple[float, Action]]
"""When which cure was chosen; oldest first."""


class CountingScope(StrEnum):
    """What reports are counted together: those of one part of a node, or all of the kind on it."""

    SUBJECT = "subject"
    NODE = "node"


class BlameIsolationMethod(StrEnum):
    """How it is found out whose fault it is. PAIR: each suspect with a node known to be good. COMPUTE: each suspect
    does work whose result is known."""

    NONE = "none"
    PAIR = "pair"
    COMPUTE = "compute"


class VerdictRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How findings of one kind are judged."""

    kind: FindingKind
    """What it judges. Exactly one rule of a kind has no ``name``: it judges whatever the named ones leave."""
    source: str
    """Where the numbers come from; "judgement" where nobody has measured."""
    name: str = ""
    """Tells this rule from others of its kind; what sentences call it is ``kind`` and ``name``."""
    xids: tuple[int, ...] = ()
    """Only findings with these XIDs. Empty: all."""
    min_severity: Severity = Severity.CRITICAL
    """Least severity that counts against the node. Milder ones are shown and judge nobody."""
    actions: tuple[Action, ...] = ()
    """Only findings that name one of these cures count. Empty: whatever they name."""
    mode: Mode = Mode.ENFORCE
    """What may follow by itself. The weaker of this and of the finding's own mode holds; where reports are counted
    (``n_of_m``), this one, since repetition is what the agent's rule does not see."""
    n_of_m: tuple[int, int] = (1, 1)
    """[n, m]: counts once n of the last m reports were bad. A report that raises the finding is bad, one that clears it
    good; a finding that flaps is one bad and one good report in each cycle."""
    window_s: float = 0.0
    """Seconds that reports are remembered for ``n_of_m``."""
    scope: CountingScope = CountingScope.SUBJECT
    """Whether ``n_of_m`` counts reports of each part (GPU, port) apart, or of the whole node."""
    boot_grace_s: float = 0.0
    """Seconds after a node's boot, or after it was first seen, in which it is not judged. What still stands then is."""
    ladder: tuple[Action, ...] = (Action.DRAIN, Action.REPAIR)
    """Cures, weakest first. It begins with the finding's own cure where that is a later one; a repeat within
    ``step_memory_s`` takes the next. ``restart_rank`` ends the process of the GPU's rank (of all the node's ranks,
    where no
    GPU is named) and costs no eviction, ``drain`` waits until the finding clears."""
    step_memory_s: float = 7 * 86400.0
    """Seconds that a step of the ladder is remembered for: longer escalates what comes back now and then. Of digests
    that differ, a tie as well."""
    coalesce_s: float = 60.0
    """Seconds within which another report belongs to the step that was taken: all GPUs of a node tell of one crash."""
    clear_s: float = 0.0
    """Seconds for which it must have been clear before a quarantined node may return, beyond the agent's own rule."""
    diagnostics: tuple[ProbeKind, ...] = (ProbeKind.ALL_REDUCE,)
    """What the node has to pass on its way back, in this order."""
    required_passes: int = 1
    """How often it has to pass all of them in a row."""
    blame_isolation: BlameIsolationMethod = BlameIsolationMethod.NONE
    """How blame is settled that needs two to tell, before anybody is convicted."""
    correlated_nodes: int = 4
    """The same kind (and XID) on so many nodes within ``correlated_s`` is no fault of theirs, whatever the fleet's
    size. Smaller protects more, and evicts fewer in a real mass failure, which the budget would stop soon after."""
    correlated_share: float = 0.25
    """The same as a share of the known nodes, and never fewer than three, or two where they are half of all. Most nodes
    of one driver version are correlated too."""
    correlated_s: float = 120.0
    """Seconds within which they must show it, and in which an eviction for it is taken back where they do. Afterwards
    those on which it still stands are looked at again; it lasts while they are as many."""
    already_handled: str = ""
    """What has been done where it was found, for findings that need no more: said, and not held against the node. Where
    reports are counted (``n_of_m``), as long as there are fewer; each finding then counts once, however often it is
    told.
    """

    @property
    def id(self) -> str:
        """What sentences and overrides call it."""
        return f"{self.kind}.{self.name}" if self.name else str(self.kind)

    def matches(self, finding: Finding) -> bool:
        """Whether the rule is about this finding at all."""
        return finding.kind is self.kind and (not self.xids or finding.xid in self.xids)

    def counts_against_node(self, finding: Finding) -> bool:
        """Whether the finding is one that counts against its node."""
        grave = _SEVERITY_RANK[finding.severity] >= _SEVERITY_RANK[self.min_severity]
        return grave and (not self.actions or finding.action in self.actions)

    def effective_mode(self, finding: Finding) -> Mode:
        """What may follow from the finding."""
        return self.mode if self.n_of_m[0] > 1 else Mode.weakest(self.mode, finding.mode)


_SEVERITY_RANK = {severity: gravity for gravity, severity in enumerate(Severity)}

MIN_CORRELATED_NODES = 3
"""Fewest nodes that can be called correlated by ``correlated_share``: two of a fleet are two faults, which its budget
bounds."""
CORRELATED_PAIR_SHARE = 0.5
"""Share of the known nodes from which on two are correlated: no budget would let half of a fleet go."""


class Rulebook(msgspec.Struct, frozen=True):
    """All rules, by kind; in each kind the one without a name is last."""

    rules_by_kind: dict[FindingKind, tuple[VerdictRule, ...]] = {}

    def rule_for(self, finding: Finding) -> VerdictRule:
        """The rule that judges the finding. AssertionError for a kind without one: the shell checks that there is."""
        for rule in self.rules_by_kind.get(finding.kind, ()):
            if rule.matches(finding):
                return rule
        raise AssertionError(
            f"no rule for {finding.kind}: the core's policy needs a rulebook (everstep_controller.rulebook)"
        )

    def has_rule_for(self, kind: FindingKind) -> bool:
        """Whether there is a rule for the kind: rules that a journal recorded know none that came later."""
        return bool(self.rules_by_kind.get(kind))

    def default_rule(self, kind: FindingKind) -> VerdictRule:
        """The rule of the kind that has no name."""
        return self.rules_by_kind[kind][-1]

    def find_rule(self, rule_id: str) -> VerdictRule | None:
        """The rule of that id; None where a site has none of it any more."""
        return next((rule for rules in self.rules_by_kind.values() for rule in rules if rule.id == rule_id), None)

    def kinds_without_rule(self) -> list[str]:
        """Kinds that nothing judges."""
        return [str(kind) for kind in FindingKind if not self.rules_by_kind.get(kind)]


# --- counting ----------------------------------------------------------------------------------------------------


def append_report(reports: ReportHistory, rule: VerdictRule, now: float, *, bad: bool) -> ReportHistory:
    """The reports that count now, with one more."""
    recent = [entry for entry in reports if entry[0] > now - rule.window_s]
    return [*recent, (now, bad)][-min(rule.n_of_m[1], MAX_REMEMBERED) :]


def count_bad_reports(reports: ReportHistory) -> int:
    """How many of them were bad."""
    return sum(bad for _, bad in reports)


# --- ladders -----------------------------------------------------------------------------------------------------


def next_ladder_step(rule: VerdictRule, finding: Finding, steps: LadderHistory, now: float) -> int:
    """Which place of the ladder is due: the finding's own cure, or the one after what was chosen lately, or just now
    that one again."""
    due = [_first_ladder_step(rule, finding.action)]
    for at, rung in steps:
        if at > now - rule.step_memory_s and rung in rule.ladder:
            due.append(rule.ladder.index(rung) + (at <= now - rule.coalesce_s))
    return min(max(due), len(rule.ladder) - 1)


def _first_ladder_step(rule: VerdictRule, action: Action) -> int:
    """Where the ladder begins for a finding that names ``cure``. A power cycle that the agent calls ``drain`` is a
    reboot where the ladder has no waiting."""
    if action is Action.DRAIN and action not in rule.ladder:
        action = Action.REBOOT_NODE
    if action in rule.ladder:
        return rule.ladder.index(action)
    if action not in LADDER_ACTIONS:
        return 0
    stronger = [
        place for place, rung in enumerate(rule.ladder) if LADDER_ACTIONS.index(rung) >= LADDER_ACTIONS.index(action)
    ]
    return stronger[0] if stronger else len(rule.ladder) - 1


def was_step_taken(steps: LadderHistory, rule: VerdictRule, action: Action, now: float) -> bool:
    """Whether this very step has been taken just now."""
    return any(taken is action and at > now - rule.coalesce_s for at, taken in steps)


def append_ladder_step(steps: LadderHistory, rule: VerdictRule, action: Action, now: float) -> LadderHistory:
    """The steps that count now, with one more unless it has just been taken."""
    lately = [step for step in steps if step[0] > now - rule.step_memory_s]
    return lately if was_step_taken(steps, rule, action, now) else [*lately, (now, action)][-MAX_REMEMBERED:]


def describe_action(action: Action) -> str:
    """A cure as sentences say it."""
    return "drain until it clears" if action is Action.DRAIN else action.replace("_", " ")


class CorePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the core decides. Defaults are the production preset; ``lab()`` is quick for one machine and for tests."""

    # liveness
    suspect_after_s: float = 5.0
    """Least seconds without a word until a node is suspected. Beats come every second: shorter doubts a node for a few
    lost packets, longer delays what only silence can tell. A node that took longer pauses lately is given twice the
    longest of them."""
    suspect_after_max_s: float = 30.0
    """Most seconds of that. Larger bears with agents that stand still for long, smaller bounds what a node that has
    become slow bit by bit can ask for."""
    lost_after_s: float = 20.0
    """Seconds without a word until a node is lost that was suspected after ``suspect_after_s``: its jobs regroup
    without it. One that is suspected later is lost as much later. Witnesses shorten this wait."""
    suspect_after_peer_loss_s: float = 1.5
    """Least seconds without a word until a node is suspected that others have lost (``min_peer_witnesses``, or one and
    a
    failure in its job). More than the second between beats, else a node that is there could not refute it in time;
    longer lets its job wait."""
    min_peer_witnesses: int = 2
    """Nodes whose vaults must have lost a silent node's, where nothing in its job says that somebody is missing. One
    can be wrong about its own network; more are rarely there, since copies go to few nodes."""
    disconnect_grace_s: float = 3.0
    """Seconds a node whose connection closed may take to come back (an agent's restart takes about one) before its
    jobs regroup without it. With a witness in the job there is no grace."""
    launcher_rejoin_grace_s: float = 10.0
    """Seconds a launcher may take to join again after its agent began a new life, before it is taken for gone."""
    rejoin_window_s: float = 3.0
    """Seconds after this controller's start that a regrouping waits for members that it has not heard yet, at least.
    Shorter leaves out nodes that are only on their way back to us, longer lets a job wait for one that is dead."""
    rejoin_window_quiet_s: float = 1.0
    """It goes on waiting until none has come for so long: a large fleet takes a while. Agents beat every second."""
    rejoin_window_max_s: float = 30.0
    """Seconds after the start that end it in any case."""
    correlated_silence_share: float = 0.3
    """Share of the fleet that, silent at once, is taken for a fault of the network or of this controller: no node is
    declared lost on silence alone until it is over. Smaller protects more and reacts later to real mass failures."""
    correlated_silence_group_share: float = 0.75
    """The same of the nodes of one rack, switch, power domain, driver or agent version: that part of the network, or
    that software, is suspected first. Larger believes a half dead rack node by node; smaller doubts a rack's switch
    sooner."""
    correlated_silence_min_nodes: int = 3
    """Fewest silent nodes that can be called correlated; below, every loss is taken at its word."""
    correlated_silence_max_s: float = 60.0
    """Seconds after which even a correlated silence is believed."""

    # regrouping
    collective_settle_s: float = 0.15
    """Seconds to wait, after a collective failed, for whoever names the culprit. gloo tells neighbours within 15 to
    80 ms, an agent sees a dead rank in 1 ms; too short regroups with the dead one in the roster once more."""
    collective_settle_max_s: float = 5.0
    """Bound of that wait, which doubles with each blind regrouping inside ``job_failure_window_s``."""
    stall_settle_s: float = 0.05
    """Seconds to wait after the first stalled rank for the others' word, so that the right one is named."""
    stall_settle_max_s: float = 0.5
    """Bound of that wait while more than one rank has said nothing."""
    resume_deadline_s: float = 300.0
    """Seconds for all ranks of a generation to finish its first step (restoring and compiling included)."""
    resume_deadline_max_s: float = 3600.0
    """Bound of that deadline, which doubles when a generation failed to resume."""
    boundary_margin_steps: int = 2
    """Steps between the newest one reported and an announced boundary, so that nobody has passed it when told."""
    boundary_margin_s: float = 0.3
    """The same in seconds: agents gather reports for up to 0.1 s, and the announcement has to travel. The longer
    of both holds."""
    boundary_fallback_s: float = 2.0
    """Least seconds to wait for a boundary before the generation is replaced at once."""
    boundary_fallback_steps: float = 10.0
    """The same in step times; the longer of both holds."""
    growth_interval_s: float = 30.0
    """Least seconds between a generation and growth: each costs a regrouping, spares arrive in groups."""
    growth_gather_s: float = 1.0
    """Seconds that growth, or the end of a pause, waits for more of the job's nodes once there is one. Longer gathers
    more of those that come back together, shorter lets a paused job go on sooner."""
    preempt_after_s: float = 120.0
    """Seconds a job is below its minimum before it takes a node of a job of lower priority, and the least seconds
    between two such losses of one job. Longer spares running jobs a regrouping for a node that only blinked, shorter
    keeps the more important job waiting less."""
    straggler_factor: float = 1.3
    """Times the job's median time outside collectives that make a rank slow. Smaller finds a GPU at a lower clock
    (a tenth is common between healthy ones), larger only what is broken."""
    straggler_window_s: float = 30.0
    """Seconds between two comparisons."""
    straggler_windows: int = 10
    """The latest comparisons that count."""
    straggler_count: int = 8
    """How many of them a node is slow in before it is named: more is surer and later."""
    straggler_share: float = 0.1
    """Share of a job's nodes that, slow at once, are not at fault themselves (one always may be)."""
    straggler_replace: bool = True
    """Whether a named node is replaced at a boundary where a spare is able; otherwise it is only recommended."""
    rank_flap_count: int = 5
    """Losses of ranks on one node inside ``job_failure_window_s`` that exclude the node from the job."""
    job_failure_window_s: float = 600.0
    """Seconds that rank losses, blind regroupings and undecided votes are remembered for."""
    node_flap_count: int = 5
    """Losses of a node by itself inside ``node_flap_window_s`` after which it is named (``node.flapping``). At one loss
    in 1,000 hours (Meta's RSC-1) chance does that to one of 2,000 nodes in two years; fewer names it sooner, and
    whoever restarts agents by hand as well."""
    node_flap_window_s: float = 7 * 86400.0
    """Seconds for which such losses count, and the finding stands after the last: longer finds who dies once a day."""
    digest_tie_count: int = 3
    """Digest votes of a job inside ``job_failure_window_s`` that ended without the liar's eviction (no majority, or
    held by
    the budget) after which the job is stopped: it would only compute the same wrong steps again."""
    commit_interval_per_rank_s: float = 0.0005
    """Seconds between commits for each rank of a job, where that is more than ``commit_interval_s``: every rank says of
    each candidate that it keeps it, so that shorter costs this controller more. 10,000 ranks commit every 5 s, and cost
    it some 3 % of a core."""
    commit_interval_s: float = 0.5
    """Seconds between commits of a job that are aimed at, and the time in which a notice of the next one must reach
    every rank. Where a step takes longer, every second or third step is committed."""
    candidate_timeout_s: float = 2.0
    """Seconds beyond its due time after which a version that was to be committed is given up for a later one."""
    missed_copies_count: int = 3
    """Versions in a row that cannot be committed because the same node took no copies, until these go elsewhere. Each
    takes about ``candidate_timeout_s``; more bears longer troubles of a vault, fewer commits again sooner."""
    replica_node_skip_s: float = 600.0
    """Seconds for which such a node is given no copies of that job, unless there is nobody else."""

    jobs_per_node: int = 32
    """Unfinished jobs that one node may offer itself to; a launcher that brings one more is refused. Jobs that never
    formed, and whose launchers have all left, give way first. Looking at all jobs of a node that want it at once takes
    this number cubed where each has another priority: 10 ms for 32."""

    # eviction
    eviction_count: int = 4
    """Evictions the fleet may suffer inside ``eviction_window_s``. One more latches a breaker: nobody is evicted until
    an operator resets it. Larger clears a bad batch of nodes unattended, smaller asks a person sooner."""
    eviction_share: float = 0.1
    """The same as a share of known nodes; the smaller of both holds, but one eviction is always allowed. It is what
    keeps a small fleet from losing half of itself to one bad rule."""
    eviction_rack_count: int = 2
    """Evictions that one rack may suffer inside the window, as far as the fleet's own budget goes. Further ones are
    held until it has passed: many sick nodes in one rack have their rack in common. Larger trusts the findings, smaller
    the coincidence."""
    eviction_rack_share: float = 0.5
    """The same as a share of the rack's nodes."""
    eviction_job_count: int = 3
    """Nodes that one job may lose to evictions inside the window. Further ones are held until it has passed: what falls
    on one job only may be what the job does to its nodes."""
    eviction_job_share: float = 0.25
    """The same as a share of the job's nodes."""
    eviction_window_s: float = 3600.0
    """Seconds of that window: longer makes every eviction count for longer."""

    # readmission
    quarantine_min_s: float = 60.0
    """Least seconds in quarantine, so that a picture sent before the finding does not clear it."""
    probation_beats: int = 30
    """Clean heartbeats on probation before a node is healthy."""
    probe_required: bool = True
    """Whether the way back leads through an all-reduce with a healthy partner (left out where there is none)."""
    probe_sizes: tuple[int, ...] = (8, 65536, 1 << 20, 16 << 20)
    """Bytes of the all-reduces on the way back. The partner may be training: larger ones say more about its links
    and take more of them."""
    probe_timeout_s: float = 60.0
    """Seconds for both sides to report a probe."""
    probe_retry_s: float = 60.0
    """Seconds before a failed probe is repeated; doubles with each failure."""
    probe_retry_max_s: float = 3600.0
    """Bound of that wait."""
    offender_wait_s: float = 600.0
    """Seconds in quarantine of a node whose score of offences is 2; doubles with each point more. A first offence waits
    only for its causes to clear."""
    offender_wait_max_s: float = 86400.0
    """Bound of that wait."""

    # findings
    rules: Rulebook = Rulebook()
    """How findings are judged: read from policy files by the shell (``everstep_controller.rulebook``)."""
    finding_burst: int = 8
    """Findings of one kind on one node that are written down one by one; of more the 16th, 32nd and so on are, until
    none came for ``finding_quiet_s``. Every one of them is judged."""
    finding_quiet_s: float = 60.0
    """Seconds without a finding of the kind after which they are written down one by one again."""
    slow_link_bytes_per_s: float = 0.0
    """Bus bandwidth of the largest probe below which a link is called slow. It depends on the network; 0 judges none.
    """

    # remedies
    remediation_mode: Mode = Mode.RECOMMEND
    """What is asked of the outside by itself along a rule's ladder (reset, reboot, repair). ``recommend``: nothing but
    cordons, and the node waits until its findings clear. ``enforce`` is for sites where something carries it out."""
    remediation_timeout_s: float = 7200.0
    """Seconds after which a reset or reboot of which nothing was heard counts as failed: longer than a reboot may take
    that waits for the node to be idle (an hour), and for its turn. Who has it carried out gives up before that."""
    remediation_settle_s: float = 300.0
    """Seconds after a confirmed remedy for the findings to clear, before the next cure of the ladder is due."""
    remediations_per_node: int = 3
    """Automatic resets and reboots of one node inside ``remediation_node_window_s``; after them it goes to repair."""
    remediation_node_window_s: float = 7 * 86400.0
    """Seconds of that window."""
    remediations_per_fleet: int = 10
    """The same of the whole fleet inside ``remediation_fleet_window_s``: a wrong rule must not reboot everything."""
    remediation_fleet_window_s: float = 3600.0
    """Seconds of that window; what comes on top waits for it."""
    rank_restarts_per_node: int = 3
    """Restarts of a node's ranks inside ``remediation_node_window_s``; after them the next step of the ladder is
    due."""
    rank_restarts_per_fleet: int = 20
    """The same of the whole fleet inside ``remediation_fleet_window_s``: each costs a job a regrouping, and a wrong
    rule
    must not cost every job one. What comes on top waits."""
    partner_wait_s: float = 5.0
    """Seconds until a node whose partner for a probe is taken looks for one again."""

    # repeat offenders
    offender_half_life_s: float = 7 * 86400.0
    """Seconds in which a node's score of offences halves. 1.2 % of nodes are lemons, and three of 63 caused half of
    all exclusions (published fleets): longer finds more of them, and forgives slower."""
    offender_repair_score: float = 5.0
    """A node goes to repair instead of back once its score, or the plain sum of its offences within one half-life, is
    that high: an eviction or a relapse on probation counts 1, a failed probe half of that. So 5 means five evictions in
    a week, or fewer a week for longer (four a week reach a score of 5 in the third)."""

    # what is forgotten
    forget_nodes_after_s: float = 30 * 86400.0
    """Seconds for which a node was not heard after which it is forgotten, where no person has a say in it (held, in
    repair, computed wrongly). Longer knows again who was away for long, shorter keeps the list short. 0: never."""
    forget_jobs_after_s: float = 30 * 86400.0
    """Seconds after a job's end after which it is forgotten, with its rosters and versions. Generation numbers begin
    anew for a job that is run under its name later. 0: never."""
    end_abandoned_jobs_after_s: float = 86400.0
    """Seconds after all launchers of a job have left, where none came, after which it is ended as failed: until then it
    can be started again from memory, which it keeps on its nodes. Longer keeps it longer from others. 0: never."""

    # versions
    version_window: int = 64
    """Versions of a job followed at once; older unfinished ones are given up."""
    vault_order_retry_s: float = 10.0
    """Seconds after which a vault that has not answered an order (storage, parity) is asked again, and after which
    another version is ordered where one was given up; the latter doubles with each in a row."""
    vault_order_retry_max_s: float = 600.0
    """Bound of that wait."""
    parity_interval_s: float = 5.0
    """Seconds between versions whose parity is made. Each costs two reads of the whole state over the network; what
    lies between them is the most that a job on parity alone computes again after a loss."""
    vault_order_failures: int = 5
    """Answers of vaults that say "not now" (storage away, a node that is silent) until the version is given up."""

    @staticmethod
    def production() -> CorePolicy:
        """For fleets: slow to doubt, slow to evict."""
        return CorePolicy()

    @staticmethod
    def lab() -> CorePolicy:
        """For one machine, demonstrations and tests: everything within seconds."""
        return CorePolicy(
            suspect_after_s=2.5,
            suspect_after_max_s=10.0,
            suspect_after_peer_loss_s=0.8,
            rejoin_window_s=1.0,
            rejoin_window_quiet_s=0.5,
            lost_after_s=6.0,
            disconnect_grace_s=1.0,
            launcher_rejoin_grace_s=5.0,
            correlated_silence_max_s=15.0,
            resume_deadline_s=30.0,
            resume_deadline_max_s=240.0,
            growth_interval_s=1.0,
            growth_gather_s=0.2,
            preempt_after_s=2.0,
            straggler_factor=3.0,
            straggler_window_s=2.0,
            rank_flap_count=30,
            job_failure_window_s=60.0,
            node_flap_window_s=600.0,
            eviction_count=4,
            eviction_share=1.0,
            eviction_rack_count=4,
            eviction_rack_share=1.0,
            eviction_job_count=4,
            eviction_job_share=1.0,
            eviction_window_s=300.0,
            quarantine_min_s=2.0,
            probation_beats=3,
            probe_sizes=(8, 65536, 1 << 20),
            probe_timeout_s=30.0,
            probe_retry_s=2.0,
            offender_wait_s=5.0,
            finding_quiet_s=5.0,
            remediation_timeout_s=30.0,
            remediation_settle_s=5.0,
            partner_wait_s=0.5,
            offender_half_life_s=60.0,
            offender_repair_score=12.0,
            parity_interval_s=0.5,
            vault_order_retry_s=1.0,
            vault_order_retry_max_s=20.0,
        )

    def validate(self) -> CorePolicy:
        """Returns the policy. Raises ConfigurationError for values that contradict each other."""
        for wrong, mend in self._contradictions():
            if wrong:
                raise ConfigurationError(mend)
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        durations = [name for name in self.__struct_fields__ if name.endswith("_s") and getattr(self, name) < 0]
        counts = (
            "correlated_silence_min_nodes",
            "boundary_margin_steps",
            "rank_flap_count",
            "node_flap_count",
            "eviction_count",
            "eviction_rack_count",
            "eviction_job_count",
            "min_peer_witnesses",
            "version_window",
            "digest_tie_count",
            "straggler_windows",
            "straggler_count",
            "finding_burst",
            "remediations_per_node",
            "remediations_per_fleet",
            "rank_restarts_per_node",
            "rank_restarts_per_fleet",
            "vault_order_failures",
            "jobs_per_node",
        )
        small = [name for name in counts if getattr(self, name) < 1]
        shares = [name for name in self.__struct_fields__ if name.endswith("_share")]
        return (
            (bool(durations), f"seconds cannot be negative: {', '.join(durations)}"),
            (bool(small), f"must be at least 1: {', '.join(small)}"),
            (
                self.suspect_after_s >= self.lost_after_s,
                f"suspect_after_s ({self.suspect_after_s}) must be less than lost_after_s ({self.lost_after_s}): "
                "a node is suspected before it is lost",
            ),
            (
                self.suspect_after_s <= 1.0,
                f"suspect_after_s ({self.suspect_after_s}) must exceed the second between beats: one late is no doubt",
            ),
            (
                self.suspect_after_max_s < self.suspect_after_s,
                f"suspect_after_max_s ({self.suspect_after_max_s}) must not be less than suspect_after_s "
                f"({self.suspect_after_s}): they are the ends of one range",
            ),
            (
                self.suspect_after_peer_loss_s >= self.suspect_after_s,
                f"suspect_after_peer_loss_s ({self.suspect_after_peer_loss_s}) must be less than "
                f"suspect_after_s ({self.suspect_after_s}): "
                "witnesses shorten the wait",
            ),
            (
                self.disconnect_grace_s > self.lost_after_s,
                f"disconnect_grace_s ({self.disconnect_grace_s}) must not exceed lost_after_s ({self.lost_after_s}): "
                "a closed connection says more than silence",
            ),
            (
                self.collective_settle_s > self.collective_settle_max_s,
                "collective_settle_s must not exceed collective_settle_max_s",
            ),
            (self.rejoin_window_s > self.rejoin_window_max_s, "rejoin_window_s must not exceed rejoin_window_max_s"),
            (self.stall_settle_s > self.stall_settle_max_s, "stall_settle_s must not exceed stall_settle_max_s"),
            (
                self.resume_deadline_s > self.resume_deadline_max_s,
                "resume_deadline_s must not exceed resume_deadline_max_s",
            ),
            (
                any(not 0 < getattr(self, name) <= 1 for name in shares),
                f"shares are above 0 and at most 1: {', '.join(shares)}",
            ),
            (
                self.straggler_factor <= 1.0 or self.straggler_count > self.straggler_windows,
                "straggler_factor must exceed 1, and straggler_count must not exceed straggler_windows",
            ),
            (self.probation_beats < 0, "probation_beats cannot be negative"),
            (self.offender_half_life_s <= 0, "offender_half_life_s must be positive: offences are forgotten by halves"),
            (
                self.offender_repair_score <= 1.0,
                "offender_repair_score must exceed 1: one eviction alone sends nobody to repair",
            ),
            (
                self.offender_wait_s > self.offender_wait_max_s or self.probe_retry_s > self.probe_retry_max_s,
                "a wait must not exceed its own bound (offender_wait_max_s, probe_retry_max_s)",
            ),
            (
                not 0 < self.vault_order_retry_s <= self.vault_order_retry_max_s,
                "vault_order_retry_s must be positive and not exceed vault_order_retry_max_s",
            ),
        )
