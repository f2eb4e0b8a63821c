"""Settings of every decision of the core, each with its unit, its reason and its trade-off."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Finding, FindingKind, Mode, ProbeKind, Severity

# Rules on findings
#
# The agent's policy turns samples into findings. A rule here judges findings across time and nodes: how often one must
# occur before it counts, on how many nodes it has a common cause, and which action follows which.

LADDER_ACTIONS = (Action.RESTART_RANK, Action.DRAIN, Action.RESET_GPU, Action.REBOOT_NODE, Action.REPAIR)
"""Actions that a ladder may contain, weakest first. DRAIN keeps the node out of service until the finding clears."""

MAX_REMEMBERED = 16
"""Maximum number of remembered reports per finding, and of remembered steps per ladder, on one node."""

ReportHistory = list[tuple[float, bool]]
"""(time, whether the report was bad), oldest first."""

LadderHistory = list[tuple[float, Action]]


class CountingScope(StrEnum):
    """Scope in which reports are counted together."""

    SUBJECT = "subject"
    """One part of a node, such as a GPU or a port."""
    NODE = "node"


class BlameIsolationMethod(StrEnum):
    """Method that finds out which of several suspects is at fault."""

    NONE = "none"
    """No isolation."""
    PAIR = "pair"
    """Probe each suspect together with a node known to be good."""
    COMPUTE = "compute"
    """Let each suspect do work with a known result."""


class VerdictRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rule that judges findings of one kind."""

    kind: FindingKind
    """Kind of finding. Exactly one rule of each kind has no ``name`` and judges what the named rules leave."""
    source: str
    """Source of the numbers; "judgement" if there is no measurement."""
    name: str = ""
    """Distinguishes this rule from others of its kind. Sentences call the rule by ``kind`` and ``name``."""
    xids: tuple[int, ...] = ()
    """XIDs of the findings that the rule judges; empty for all."""
    min_severity: Severity = Severity.CRITICAL
    """Lowest severity that counts against the node. Milder findings are shown and have no consequence."""
    actions: tuple[Action, ...] = ()
    """Actions that a finding must name to count; empty for any."""
    mode: Mode = Mode.ENFORCE
    """Automatic consequences allowed: the weaker of this mode and the finding's own mode. Where reports are counted
    (``n_of_m``), this mode alone holds, because the agent's rule does not see the repetition."""
    n_of_m: tuple[int, int] = (1, 1)
    """[n, m]: the finding counts once n of the last m reports were bad. A report that raises the finding is bad, and
    one that clears it is good; a flapping finding yields one of each per cycle."""
    window_s: float = 0.0
    """Seconds for which reports are remembered for ``n_of_m``."""
    scope: CountingScope = CountingScope.SUBJECT
    """Scope of ``n_of_m``: each part (GPU, port) by itself, or the whole node."""
    boot_grace_s: float = 0.0
    """Seconds after a node's boot, or its first sighting, in which the node is not judged. Findings that still stand at
    the end are judged then."""
    ladder: tuple[Action, ...] = (Action.DRAIN, Action.REPAIR)
    """Actions, weakest first. The ladder begins with the finding's own action where that is a later one, and a repeat
    within ``step_memory_s`` takes the next. ``restart_rank`` ends the process of the GPU's rank (of all ranks of the
    node if no GPU is named) and costs no eviction. ``drain`` waits until the finding clears."""
    step_memory_s: float = 7 * 86400.0
    """Seconds for which a step of the ladder is remembered; longer escalates faults that recur rarely. For differing
    digests, also the seconds for which a tie is remembered."""
    coalesce_s: float = 60.0
    """Seconds within which another report belongs to the step already taken: all GPUs of a node report one crash."""
    clear_s: float = 0.0
    """Seconds for which the finding must be clear before a quarantined node returns, beyond the agent's own rule."""
    diagnostics: tuple[ProbeKind, ...] = (ProbeKind.ALL_REDUCE,)
    """Diagnostics that the node must pass before readmission, in this order."""
    required_passes: int = 1
    """Number of consecutive passes of all diagnostics."""
    blame_isolation: BlameIsolationMethod = BlameIsolationMethod.NONE
    """Method that settles blame before any node is evicted, for findings with several suspects."""
    correlated_nodes: int = 4
    """Number of nodes that show the same kind (and XID) within ``correlated_s`` and are therefore not at fault,
    whatever the size of the fleet. Smaller protects more nodes, but evicts fewer in a real mass failure, which the
    budget would stop soon after."""
    correlated_share: float = 0.25
    """The same as a share of known nodes: at least three nodes, or two if they are half of the fleet. Most of the nodes
    with one driver version are correlated too."""
    correlated_s: float = 120.0
    """Seconds within which the nodes must show the finding, and within which an eviction for it is rolled back. The
    outbreak lasts while enough nodes still show the finding; after its end those nodes are judged."""
    already_handled: str = ""
    """Action already taken where the finding arose; such findings are shown and do not count against the node. Where
    reports are counted (``n_of_m``), this holds below the threshold, and each finding counts once, however often it is
    reported."""

    @property
    def id(self) -> str:
        """Id that sentences and overrides use."""
        return f"{self.kind}.{self.name}" if self.name else str(self.kind)

    def matches(self, finding: Finding) -> bool:
        """Return whether the rule concerns the finding."""
        return finding.kind is self.kind and (not self.xids or finding.xid in self.xids)

    def counts_against_node(self, finding: Finding) -> bool:
        """Return whether the finding counts against its node."""
        grave = finding.severity.gravity >= self.min_severity.gravity
        return grave and (not self.actions or finding.action in self.actions)

    def effective_mode(self, finding: Finding) -> Mode:
        """Return what may follow automatically from the finding."""
        return self.mode if self.n_of_m[0] > 1 else Mode.weakest(self.mode, finding.mode)


MIN_CORRELATED_NODES = 3
"""Minimum number of nodes that ``correlated_share`` can call correlated. Two nodes of a fleet are two faults, which the
budget bounds."""
CORRELATED_PAIR_SHARE = 0.5
"""Share of known nodes from which two are correlated, because no budget allows the loss of half of a fleet."""


class Rulebook(msgspec.Struct, frozen=True):
    """All rules by kind; the rule without a name comes last in its kind."""

    rules_by_kind: dict[FindingKind, tuple[VerdictRule, ...]] = {}

    def rule_for(self, finding: Finding) -> VerdictRule:
        """Return the rule that judges the finding. Raise AssertionError if there is none; the shell prevents that."""
        for rule in self.rules_by_kind.get(finding.kind, ()):
            if rule.matches(finding):
                return rule
        raise AssertionError(
            f"no rule for {finding.kind}: the core's policy needs a rulebook (everstep_controller.policy.rulebook)"
        )

    def default_rule(self, kind: FindingKind) -> VerdictRule:
        """Return the rule of the kind that has no name."""
        return self.rules_by_kind[kind][-1]

    def find_rule(self, rule_id: str) -> VerdictRule | None:
        """Return the rule with this id, or None if the site no longer has it."""
        return next((rule for rules in self.rules_by_kind.values() for rule in rules if rule.id == rule_id), None)


# Counting


def append_report(reports: ReportHistory, rule: VerdictRule, now: float, *, bad: bool) -> ReportHistory:
    """Return the reports that still count, with one more."""
    recent = [entry for entry in reports if entry[0] > now - rule.window_s]
    return [*recent, (now, bad)][-min(rule.n_of_m[1], MAX_REMEMBERED) :]


def count_bad_reports(reports: ReportHistory) -> int:
    return sum(bad for _, bad in reports)


# Ladders


def next_ladder_step(rule: VerdictRule, finding: Finding, steps: LadderHistory, now: float) -> int:
    """Return the index of the due step: the finding's own action, or the one after the latest unless that is new."""
    due = [_first_ladder_step(rule, finding.action)]
    for at, ladder_action in steps:
        if at > now - rule.step_memory_s and ladder_action in rule.ladder:
            due.append(rule.ladder.index(ladder_action) + (at <= now - rule.coalesce_s))
    return min(max(due), len(rule.ladder) - 1)


def _first_ladder_step(rule: VerdictRule, action: Action) -> int:
    """Return the index at which the ladder begins for a finding that names ``action``."""
    if action is Action.DRAIN and action not in rule.ladder:
        action = Action.REBOOT_NODE  # agents report a needed power cycle as ``drain``
    if action in rule.ladder:
        return rule.ladder.index(action)
    if action not in LADDER_ACTIONS:
        return 0
    gravity = LADDER_ACTIONS.index
    stronger = (place for place, step in enumerate(rule.ladder) if gravity(step) >= gravity(action))
    return next(stronger, len(rule.ladder) - 1)


def was_step_taken(steps: LadderHistory, rule: VerdictRule, action: Action, now: float) -> bool:
    """Return whether the step was taken within ``coalesce_s``."""
    return any(taken is action and at > now - rule.coalesce_s for at, taken in steps)


def append_ladder_step(steps: LadderHistory, rule: VerdictRule, action: Action, now: float) -> LadderHistory:
    """Return the steps that still count, with one more unless it was just taken."""
    lately = [step for step in steps if step[0] > now - rule.step_memory_s]
    return lately if was_step_taken(steps, rule, action, now) else [*lately, (now, action)][-MAX_REMEMBERED:]


def describe_action(action: Action) -> str:
    """Return the action in the words of sentences."""
    return "drain until it clears" if action is Action.DRAIN else action.replace("_", " ")


class LivenessPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When nodes are suspected and lost, and how long a job waits for their return."""

    suspect_after_s: float = 5.0
    """Minimum seconds of silence before a node is suspected. Heartbeats come every second: shorter suspects a node for
    a few lost packets, longer delays the detection of silent failures. A node with long recent pauses is allowed twice
    the longest of them."""
    suspect_after_max_s: float = 30.0
    """Maximum of that allowance. Larger tolerates agents that stall for long, smaller limits the allowance of a node
    that slows down gradually."""
    lost_after_s: float = 20.0
    """Seconds of silence before a node that was suspected after ``suspect_after_s`` is lost; its jobs regroup without
    it. A node that is suspected later is lost later by the same amount. Witnesses shorten this wait."""
    suspect_after_peer_loss_s: float = 1.5
    """Minimum seconds of silence before a node is suspected that others have lost (``min_peer_witnesses`` of them, or
    one together with a failure in its job). It must exceed the second between heartbeats, so that a live node can
    refute the loss; longer delays the job."""
    min_peer_witnesses: int = 2
    """Number of nodes whose vaults must have lost a silent node's vault if nothing in its job reports a missing member.
    One node can be wrong about its own network; more are rare, because copies go to few nodes."""
    disconnect_grace_s: float = 3.0
    """Seconds that a node may take to return after its connection closed, before its jobs regroup without it; an
    agent's restart takes about one second. With a witness in the job there is no grace."""
    launcher_rejoin_grace_s: float = 10.0
    """Seconds that a launcher may take to rejoin after its agent began a new life."""
    rejoin_window_s: float = 3.0
    """Minimum seconds after this controller's start for which a regroup waits for members not heard yet. Shorter leaves
    out nodes that are about to reconnect, longer delays jobs with a dead node."""
    rejoin_window_quiet_s: float = 1.0
    """The wait goes on until no node has come for this many seconds, since a large fleet takes a while. Agents send
    heartbeats every second."""
    rejoin_window_max_s: float = 30.0
    """Maximum seconds after the start for that wait."""
    flap_count: int = 5
    """Losses of a node by itself inside ``flap_window_s`` after which it is named (``node.flapping``). At one loss
    in 1,000 hours (Meta's RSC-1), chance does that to one of 2,000 nodes in two years. Fewer names a bad node sooner,
    but also nodes whose agents people restart by hand."""
    flap_window_s: float = 7 * 86400.0
    """Seconds for which such losses count, and for which the finding stands after the last one; longer finds nodes that
    die once a day."""


class CorrelatedSilencePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the silence of many nodes points to the network or to this controller."""

    share: float = 0.3
    """Share of the fleet whose simultaneous silence points to the network or to this controller. Until it is over, no
    node is declared lost for silence alone. Smaller protects more nodes, but reacts later to real mass failures."""
    group_share: float = 0.75
    """The same share for the nodes of one rack, switch, power domain, driver version or agent version. Larger judges a
    half-dead rack node by node; smaller suspects a rack's switch sooner."""
    min_nodes: int = 3
    """Minimum number of silent nodes that count as correlated; with fewer, every loss is believed."""
    max_s: float = 60.0
    """Seconds after which even a correlated silence is believed."""


class RegroupPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job leaves a generation and starts the next."""

    collective_settle_s: float = 0.15
    """Seconds to wait after a failed collective for the report that names the culprit. gloo informs neighbours within
    15 to 80 ms, and an agent sees a dead rank in 1 ms. If it is too short, the job regroups with the dead rank once
    more."""
    collective_settle_max_s: float = 5.0
    """Maximum of that wait, which doubles with each regroup inside ``failure_window_s`` that names no culprit."""
    resume_deadline_s: float = 300.0
    """Seconds for all ranks of a generation to finish its first step, including restore and compilation."""
    resume_deadline_max_s: float = 3600.0
    """Maximum of that deadline, which doubles when a generation fails to resume."""
    boundary_margin_steps: int = 2
    """Steps between the newest reported step and an announced boundary, so that no rank has passed it when the
    announcement arrives."""
    boundary_margin_s: float = 0.3
    """The same in seconds, because agents collect reports for up to 0.1 s and the announcement has to travel. The
    longer of both holds."""
    boundary_fallback_s: float = 2.0
    """Minimum seconds to wait for a boundary before the generation is replaced at once."""
    boundary_fallback_steps: float = 10.0
    """The same in step times; the longer of both holds."""
    failure_window_s: float = 600.0
    """Seconds for which rank losses, regroups that name no culprit and undecided votes are remembered."""
    rank_flap_count: int = 5
    """Losses of ranks on one node inside ``failure_window_s`` that exclude the node from the job."""


class StallPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When ranks without progress are named, and replaced as hung."""

    settle_s: float = 0.05
    """Seconds from the report of a rank without progress to the decision, so that reports are judged together."""
    settle_max_s: float = 0.5
    """Maximum of that wait, which grows with the number of ranks."""
    notice_s: float = 5.0
    """Seconds without progress after which the rank for which the others wait is named. Nothing is done to it."""
    hang_floor_s: float = 60.0
    """Minimum seconds for which a rank stands still before it counts as hung, unless the job sets a threshold. Smaller
    finds hangs sooner, and takes a wait for a slow server for one."""
    call_notice_s: float = 60.0
    """Seconds in one call that uses a processor after which the rank is named: the call may never end."""
    returned_floor_s: float = 5.0
    """Seconds for which all other ranks wait in a collective that a rank which has returned never enters, before the
    job ends. Where they wait in groups of some ranks or for messages, ``hang_floor_s`` holds."""
    hang_kills_per_place: int = 2
    """Number of times that hung ranks are replaced at one place of the script. A place that hangs again does so because
    of the script, and a person must decide."""


class JobPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How jobs grow and share nodes."""

    growth_interval_s: float = 30.0
    """Minimum seconds between a generation and growth, because each growth costs a regroup and spares arrive in
    groups."""
    growth_gather_s: float = 1.0
    """Seconds for which growth, or the end of a pause, waits for more of the job's nodes after the first. Longer
    gathers more nodes that return together, shorter resumes a paused job sooner."""
    preempt_after_s: float = 120.0
    """Seconds below its minimum after which a job takes a node from a job of lower priority. Also the minimum seconds
    between two such losses of one job. Longer spares running jobs a regroup for a brief failure, shorter lets the more
    important job wait less."""
    per_node: int = 32
    """Unfinished jobs that one node may offer itself to; a launcher that brings one more is refused. Jobs that never
    formed and whose launchers have all left give way first. A check of all jobs that want one node takes this number
    cubed if each has another priority: 10 ms for 32."""


class StragglerPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a node is slow."""

    factor: float = 1.3
    """Multiple of the job's median time outside collectives from which a rank is slow. Smaller finds a GPU at a lower
    clock (a tenth is common between healthy ones), larger finds only broken ones."""
    window_s: float = 30.0
    """Seconds between two comparisons."""
    windows: int = 10
    """Number of latest comparisons that count."""
    count: int = 8
    """Number of those comparisons in which a node must be slow before it is named; more is surer and later."""
    share: float = 0.1
    """Share of a job's nodes that, slow at once, are not at fault themselves (one node always may be)."""
    replace: bool = True
    """Replace a named node at a boundary if a spare is available; otherwise only recommend its replacement."""


class AuditPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How differing digests and audits find the node that computes wrongly."""

    digest_tie_count: int = 3
    """Ties of a job without a culprit, within the memory of a tie, after which digests, or that audit, are compared no
    more. Also how often, inside ``regroups.failure_window_s``, a known culprit cannot be spared until the job is
    stopped: it would only compute the same wrong steps again."""
    case_s: float = 5.0
    """Seconds to wait for the statements of all ranks that took part in an audit with a difference. Ranks state their
    results within one step; longer waits for agents without a connection, and commits nothing meanwhile."""
    settle_s: float = 0.5
    """Seconds after a complete statement until it is judged, so that other ranks can say what they found in the same
    step. Ranks that have not finished that step are waited for, up to ``case_s``. A shorter wait may accuse a
    node for a fault of the program, which shows on all ranks; the accusation is then withdrawn."""
    strike_count: int = 2
    """Wrong results of a node inside ``strike_window_s`` that convict it although it did not repeat any of them
    (a strike each). 1 evicts for a single flipped bit, which a cosmic ray can cause; more lets a GPU that computes
    wrongly now and then do so more often."""
    strike_window_s: float = 7 * 86400.0
    """Seconds for which a strike counts. All faulty GPUs of a published census (AEGIS, OSDI'26) erred again."""
    candidate_max_s: float = 3600.0
    """Seconds after which a version that audits have not verified gives its place to a newer one: some runs audit too
    little to verify any. Before the first verified version, a job goes back to this candidate, so it also bounds the
    work that is lost then."""


class CheckpointPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How versions are committed, and get copies and parity."""

    commit_interval_s: float = 0.5
    """Target seconds between commits of a job, and the time in which a notice of the next commit must reach every rank.
    If a step takes long, every second or third step is committed."""
    commit_interval_per_rank_s: float = 0.0005
    """Minimum seconds between commits per rank of a job; holds where it exceeds ``commit_interval_s``. Every rank
    reports each candidate that it keeps, so shorter costs this controller more. 10,000 ranks commit every 5 s and cost
    it some 3 % of a core."""
    candidate_timeout_s: float = 2.0
    """Seconds beyond its due time after which a candidate version is abandoned for a later one."""
    version_window: int = 64
    """Versions of a job followed at once; older unfinished ones are abandoned."""
    missed_copies_count: int = 3
    """Number of consecutive versions that fail to commit because one node took no copies, before its copies go
    elsewhere. Each takes about ``candidate_timeout_s``; more tolerates longer troubles of a vault, fewer resumes
    commits sooner."""
    replica_node_skip_s: float = 600.0
    """Seconds for which such a node gets no copies of that job, unless there is no other node."""
    parity_interval_s: float = 5.0
    """Seconds between versions that get parity. Each costs two reads of the whole state over the network. The interval
    bounds the work that a job on parity alone repeats after a loss."""
    vault_order_retry_s: float = 10.0
    """Seconds after which a vault that has not answered an order (storage, parity) is asked again. Also the wait before
    another version is ordered in place of an abandoned one; that wait doubles with each abandoned version in a row."""
    vault_order_retry_max_s: float = 600.0
    """Maximum of that wait."""
    vault_order_failures: int = 5
    """"Not now" answers of vaults (storage unavailable, a silent node) after which the version is abandoned."""


class BudgetPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many automatic evictions are allowed."""

    count: int = 4
    """Evictions that the fleet may suffer inside ``window_s``. One more latches a breaker: no node is evicted
    until an operator resets it. Larger clears a bad batch of nodes unattended, smaller asks a person sooner."""
    share: float = 0.1
    """The same as a share of known nodes; the smaller of both holds, but one eviction is always allowed. The share
    keeps a small fleet from losing half of its nodes to one bad rule."""
    rack_count: int = 2
    """Evictions that one rack may suffer inside the window, within the fleet's budget. Further ones are deferred until
    the window has passed, because many sick nodes in one rack suggest a fault of the rack. Larger trusts the findings,
    smaller trusts the coincidence."""
    rack_share: float = 0.5
    """The same as a share of the rack's nodes."""
    job_count: int = 3
    """Nodes that one job may lose to evictions inside the window. Further ones are deferred until the window has
    passed, because findings in one job only may be caused by the job."""
    job_share: float = 0.25
    """The same as a share of the job's nodes."""
    window_s: float = 3600.0
    """Seconds of that window; longer makes every eviction count for longer."""


class ReadmissionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an evicted node returns."""

    quarantine_min_s: float = 60.0
    """Minimum seconds in quarantine, so that findings sent before the eviction do not end it."""
    probation_heartbeats: int = 30
    """Clean heartbeats on probation before a node is healthy."""


class ProbePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How links are probed before readmission and in operators' probes."""

    required: bool = True
    """Require an all-reduce with a healthy partner before readmission; skipped if there is no partner."""
    sizes: tuple[int, ...] = (8, 65536, 1 << 20, 16 << 20)
    """Bytes of the all-reduces before readmission. The partner may be training: larger sizes say more about its links
    and load them more."""
    timeout_s: float = 60.0
    """Seconds for both sides to report a probe."""
    retry_s: float = 60.0
    """Seconds before a failed probe is repeated; doubles with each failure."""
    retry_max_s: float = 3600.0
    """Maximum of that wait."""
    partner_wait_s: float = 5.0
    """Seconds until a node whose probe partner is busy looks for one again."""
    slow_link_bytes_per_s: float = 0.0
    """Bus bandwidth in bytes per second of the largest probe below which a link is slow. It depends on the network; 0
    disables the check."""


class OffenderPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How repeated offences lengthen a node's quarantine and send it to repair."""

    wait_s: float = 600.0
    """Seconds in quarantine for a node with an offence score of 2; doubles with each further point. A first offence
    waits only for its causes to clear."""
    wait_max_s: float = 86400.0
    """Maximum of that wait."""
    half_life_s: float = 7 * 86400.0
    """Seconds in which a node's offence score halves. In published fleets, 1.2 % of nodes are lemons, and three of 63
    nodes caused half of all exclusions. Longer finds more lemons and forgives more slowly."""
    repair_score: float = 5.0
    """Offence score, or plain sum of offences within one half-life, at which a node goes to repair instead of back. An
    eviction or a relapse on probation counts 1, a failed probe 0.5. So 5 means five evictions in a week, or fewer per
    week for longer (four a week reach a score of 5 in the third)."""


class FindingLogPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many findings are logged."""

    burst_count: int = 8
    """Findings of one kind on one node that are logged one by one. After these only the 16th, 32nd and so on are
    logged, until none came for ``quiet_s``. All of them are judged."""
    quiet_s: float = 60.0
    """Seconds without a finding of the kind after which findings are logged one by one again."""


class RemediationPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which actions of a ladder are automatic, and how many."""

    mode: Mode = Mode.RECOMMEND
    """Mode of the automatic actions on a rule's ladder (reset, reboot, repair). ``recommend`` requests only cordons,
    and the node waits until its findings clear. ``enforce`` suits sites where an executor carries out requests."""
    timeout_s: float = 7200.0
    """Seconds after which a reset or reboot without a report counts as failed. It exceeds the longest wait of a reboot
    for an idle node (an hour) and for its turn. The executor gives up before that."""
    settle_s: float = 300.0
    """Seconds for the findings to clear after a confirmed action, before the next step of the ladder is due."""
    per_node: int = 3
    """Automatic resets and reboots of one node inside ``node_window_s``; after them the node goes to
    repair."""
    node_window_s: float = 7 * 86400.0
    """Seconds of that window."""
    per_fleet: int = 10
    """Automatic resets and reboots of the whole fleet inside ``fleet_window_s``, so that a wrong rule
    cannot reboot every node."""
    fleet_window_s: float = 3600.0
    """Seconds of that window; further actions wait for its end."""
    rank_restarts_per_node: int = 3
    """Automatic restarts of a node's ranks inside ``node_window_s``; after them the next step of the ladder
    is due."""
    rank_restarts_per_fleet: int = 20
    """Automatic restarts of ranks in the whole fleet inside ``fleet_window_s``; further ones wait. Each
    costs a job a regroup, and a wrong rule must not cost every job one."""


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When absent nodes and ended jobs are forgotten."""

    forget_nodes_after_s: float = 30 * 86400.0
    """Seconds without a message after which a node is forgotten, unless a person has to decide about it (held, in
    repair, computed wrongly). Longer recognises nodes after a long absence, shorter keeps the list short. 0: never."""
    forget_jobs_after_s: float = 30 * 86400.0
    """Seconds after a job's end after which the job is forgotten, with its rosters and versions. A later job of the
    same name starts again at generation 1. 0: never."""
    end_abandoned_jobs_after_s: float = 86400.0
    """Seconds without launchers after which a job is ended as failed. Until then it can restart from memory, which it
    keeps on its nodes; longer withholds that memory from other jobs for longer. 0: never."""


class CorePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the core by topic, with defaults for fleets; ``lab_preset()`` suits one machine and tests."""

    liveness: LivenessPolicy = LivenessPolicy()
    correlated_silence: CorrelatedSilencePolicy = CorrelatedSilencePolicy()
    regroups: RegroupPolicy = RegroupPolicy()
    stalls: StallPolicy = StallPolicy()
    jobs: JobPolicy = JobPolicy()
    stragglers: StragglerPolicy = StragglerPolicy()
    audits: AuditPolicy = AuditPolicy()
    checkpoints: CheckpointPolicy = CheckpointPolicy()
    budget: BudgetPolicy = BudgetPolicy()
    readmission: ReadmissionPolicy = ReadmissionPolicy()
    probes: ProbePolicy = ProbePolicy()
    offenders: OffenderPolicy = OffenderPolicy()
    findings: FindingLogPolicy = FindingLogPolicy()
    remediation: RemediationPolicy = RemediationPolicy()
    retention: RetentionPolicy = RetentionPolicy()
    rules: Rulebook = Rulebook()
    """Rules that judge findings, read by the shell from policy files (``everstep_controller.policy.rulebook``)."""

    @staticmethod
    def lab_preset() -> CorePolicy:
        """Return the preset for one machine, demonstrations and tests: everything within seconds."""
        return CorePolicy(
            liveness=LivenessPolicy(
                suspect_after_s=2.5,
                suspect_after_max_s=10.0,
                suspect_after_peer_loss_s=0.8,
                rejoin_window_s=1.0,
                rejoin_window_quiet_s=0.5,
                lost_after_s=6.0,
                disconnect_grace_s=1.0,
                launcher_rejoin_grace_s=5.0,
                flap_window_s=600.0,
            ),
            correlated_silence=CorrelatedSilencePolicy(max_s=15.0),
            regroups=RegroupPolicy(
                resume_deadline_s=30.0, resume_deadline_max_s=240.0, rank_flap_count=30, failure_window_s=60.0
            ),
            jobs=JobPolicy(growth_interval_s=1.0, growth_gather_s=0.2, preempt_after_s=2.0),
            stragglers=StragglerPolicy(factor=3.0, window_s=2.0),
            audits=AuditPolicy(case_s=2.0),
            checkpoints=CheckpointPolicy(parity_interval_s=0.5, vault_order_retry_s=1.0, vault_order_retry_max_s=20.0),
            budget=BudgetPolicy(
                count=4, share=1.0, rack_count=4, rack_share=1.0, job_count=4, job_share=1.0, window_s=300.0
            ),
            readmission=ReadmissionPolicy(quarantine_min_s=2.0, probation_heartbeats=3),
            probes=ProbePolicy(sizes=(8, 65536, 1 << 20), timeout_s=30.0, retry_s=2.0, partner_wait_s=0.5),
            offenders=OffenderPolicy(wait_s=5.0, half_life_s=60.0, repair_score=12.0),
            findings=FindingLogPolicy(quiet_s=5.0),
            remediation=RemediationPolicy(timeout_s=30.0, settle_s=5.0),
        )

    def with_values(self, **tables: Mapping[str, Any]) -> CorePolicy:
        """Return the policy with other values by table and field, such as ``with_values(budget={"count": 2})``."""
        changed = {name: msgspec.structs.replace(getattr(self, name), **values) for name, values in tables.items()}
        return msgspec.structs.replace(self, **changed)

    def values(self) -> dict[str, Any]:
        """Return all values without the rules, by dotted name (``liveness.lost_after_s``)."""
        tables = ((name, getattr(self, name)) for name in self.__struct_fields__ if name != "rules")
        return {f"{name}.{field}": getattr(table, field) for name, table in tables for field in table.__struct_fields__}

    def validate(self) -> CorePolicy:
        """Return the policy. Raise ConfigurationError for values that contradict each other."""
        for wrong, mend in self._contradictions():
            if wrong:
                raise ConfigurationError(mend)
        return self

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        values = self.values()
        negative = [name for name, value in values.items() if name.endswith("_s") and value < 0]
        may_be_zero = "readmission.probation_heartbeats"
        small = [name for name, value in values.items() if type(value) is int and value < 1 and name != may_be_zero]
        shares = [name for name in values if name.endswith("share")]
        bounded = (
            "regroups.collective_settle",
            "liveness.rejoin_window",
            "stalls.settle",
            "regroups.resume_deadline",
            "offenders.wait",
            "probes.retry",
        )
        liveness, stragglers, checkpoints = self.liveness, self.stragglers, self.checkpoints
        return (
            (bool(negative), f"seconds cannot be negative: {', '.join(negative)}"),
            (bool(small), f"must be at least 1: {', '.join(small)}"),
            (
                any(not 0 < values[name] <= 1 for name in shares),
                f"shares are above 0 and at most 1: {', '.join(shares)}",
            ),
            (
                liveness.suspect_after_s >= liveness.lost_after_s,
                f"liveness.suspect_after_s ({liveness.suspect_after_s}) must be less than liveness.lost_after_s "
                f"({liveness.lost_after_s}): a node is suspected before it is lost",
            ),
            (
                liveness.suspect_after_s <= 1.0,
                f"liveness.suspect_after_s ({liveness.suspect_after_s}) must exceed the second between heartbeats, so "
                "that one late heartbeat raises no suspicion",
            ),
            (
                liveness.suspect_after_max_s < liveness.suspect_after_s,
                f"liveness.suspect_after_max_s ({liveness.suspect_after_max_s}) must not be less than "
                f"liveness.suspect_after_s ({liveness.suspect_after_s}): they are the ends of one range",
            ),
            (
                liveness.suspect_after_peer_loss_s >= liveness.suspect_after_s,
                f"liveness.suspect_after_peer_loss_s ({liveness.suspect_after_peer_loss_s}) must be less than "
                f"liveness.suspect_after_s ({liveness.suspect_after_s}): witnesses shorten the wait",
            ),
            (
                liveness.disconnect_grace_s > liveness.lost_after_s,
                f"liveness.disconnect_grace_s ({liveness.disconnect_grace_s}) must not exceed liveness.lost_after_s "
                f"({liveness.lost_after_s}): a closed connection says more than silence",
            ),
            *((values[f"{n}_s"] > values[f"{n}_max_s"], f"{n}_s must not exceed {n}_max_s") for n in bounded),
            (
                stragglers.factor <= 1.0 or stragglers.count > stragglers.windows,
                "stragglers.factor must exceed 1, and stragglers.count must not exceed stragglers.windows",
            ),
            (self.readmission.probation_heartbeats < 0, "readmission.probation_heartbeats cannot be negative"),
            (
                self.offenders.half_life_s <= 0,
                "offenders.half_life_s must be positive: the offence score halves once in this time",
            ),
            (
                self.offenders.repair_score <= 1.0,
                "offenders.repair_score must exceed 1: one eviction alone sends no node to repair",
            ),
            (
                not 0 < checkpoints.vault_order_retry_s <= checkpoints.vault_order_retry_max_s,
                "checkpoints.vault_order_retry_s must be positive and not exceed checkpoints.vault_order_retry_max_s",
            ),
        )
