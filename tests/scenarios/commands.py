"""What a transcript can say: of nodes, findings, remediations, jobs, people, and the controller's own troubles.

Each command is given the fleet, its plain words and its options; strings that it returns are shown as answers.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import msgspec

from everstep.clock import ManualClock
from everstep.ids import Version
from everstep.vocabulary import Action, AuditKind, Finding, FindingKind, RankActivity, Severity
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.operator_history import PolicyChange
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.checkpoints.restore_points import compute_restorability
from everstep_controller.core.effects import RequestRemediation
from everstep_controller.core.events import (
    DatabaseAvailabilityChanged,
    OperatorAction,
    RemediationFinished,
    SchedulerStateChanged,
)
from everstep_controller.core.health import eviction
from everstep_controller.core.policy import Rulebook, VerdictRule
from everstep_controller.core.seats.membership import no_seat_reason
from everstep_controller.policy.rulebook import apply_change
from everstep_controller.runtime.clock import SteadyTime
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid

Words = list[str]
Options = dict[str, str]

EPOCH = 7
"""Which life of a controller the first one of a transcript is."""


def _numbers(options: Options) -> dict[str, Any]:
    return {key: int(value) if value.lstrip("-").isdigit() else value for key, value in options.items()}


def _register(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``register n1..n4 rack=A switch=s driver=550 boot=2 gpu=GPU-new``: agents begin a life."""
    more: dict[str, Any] = {}
    if "boot" in options:
        more["boot_id"] = f"boot-{options['boot']}"
    if "driver" in options:
        more["driver_version"] = options["driver"]
    if "gpu" in options:
        more["gpus"] = (Gpu(index=0, uuid=options["gpu"], name="virtual", pci_bus_id="0", memory_bytes=1 << 30),)
    for node in words:
        record = fleet.state.nodes.get(node)
        known = {} if record is None else msgspec.structs.asdict(record.identity.domain)
        places = {key: options[key] for key in ("rack", "switch", "power") if key in options}
        fleet.register(node, domain=Domain(**(known | places)), **more)


def _wait(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``wait 3``: with a heartbeat a second from every node; ``but n4``: from all others; ``only n4``; ``silence``."""
    named, which = words[2:], words[1] if len(words) > 1 else ""
    nodes = list(fleet.state.nodes)
    beating = {"": nodes, "but": [n for n in nodes if n not in named], "only": named, "silence": []}[which]
    fleet.advance(float(words[0]), *beating)


def _finding(words: Words, options: Options) -> Finding:
    """``find n1 a few words kind=network.slow_link subject=n2 severity=warning action=drain peer=n2``."""
    kind = FindingKind(options["kind"])
    subject = options.get("subject", "0")
    return Finding(
        kind=kind,
        subject=subject,
        severity=Severity(options.get("severity", "critical")),
        action=Action(options.get("action", "none")),
        message=" ".join(words[1:]) or f"{kind} of {subject}",
        evidence={"peer": options["peer"]} if "peer" in options else {},
        xid=int(options["xid"]) if "xid" in options else None,
    )


def _xid(options: Options) -> Finding:
    return xid(int(options.get("number", "79")), Action(options.get("action", "repair")))


def _raise_xid(fleet: CoreFleet, words: Words, options: Options) -> None:
    for node in words:
        fleet.raise_finding(node, _xid(options))


def _storm(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``storm n1 12000 kinds=29 every=0.005``: so many findings of so many different XIDs."""
    for count in range(int(words[1])):
        finding = xid(200 + count % int(options["kinds"]), Action.NONE)
        counted = msgspec.structs.replace(finding, value=float(count), severity=Severity.WARNING)
        fleet.raise_finding(words[0], counted)
        fleet.now += float(options["every"])


def _flap(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``flap n1 600 every=0.1 kind=...``: so often raised and cleared."""
    finding = _finding(words[:1], options)
    for _ in range(int(words[1])):
        fleet.raise_finding(words[0], finding)
        fleet.clear_finding(words[0], finding.key)
        fleet.now += float(options["every"])


def _solos(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``solos by-hand``: the transcript answers probes of single nodes, which else succeed by themselves."""
    fleet.pass_solo_diagnostics = words[0] != "by-hand"


def _probe(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``probe n1 ok|failed|wrong because``: one side's answer to the newest probe that it takes part in."""
    name = next(name for name, probe in reversed(fleet.state.diagnostics.probes.items()) if words[0] in probe.nodes)
    fleet.report(words[0], _result(name, words))


def _answer(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``answer n1 ok|failed|wrong|unable because``: all sides of the probe that tries n1 report it."""
    name, probe = next((n, p) for n, p in fleet.state.diagnostics.probes.items() if p.tested_node == words[0])
    for node in probe.nodes:
        if name in fleet.state.diagnostics.probes:
            fleet.report(node, _result(name, words))


def _result(name: str, words: Words) -> ProbeFinished:
    began = words[1] != "unable"
    return ProbeFinished(
        probe=name, ok=words[1] == "ok", detail=" ".join(words[2:]), wrong_result=words[1] == "wrong", started=began
    )


def _action(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``action n1 ok`` or ``action n1 failed because``: how the node's newest remediation ended."""
    remediations = [
        e.remediation for e in fleet.effects if isinstance(e, RequestRemediation) and e.remediation.node == words[0]
    ]
    fleet.feed(
        RemediationFinished(
            remediation_id=remediations[-1].id, node=words[0], succeeded=words[1] == "ok", detail=" ".join(words[2:])
        )
    )


def _join(fleet: CoreFleet, words: Words, options: Options) -> None:
    fleet.join(*words, **_numbers(options))


def _lose_rank(fleet: CoreFleet, words: Words, options: Options) -> None:
    lasting = options.pop("replacement", "") != "no"
    fleet.lose_rank(int(words[0]), replacement=lasting, **_numbers(options))


def _fail_collective(fleet: CoreFleet, words: Words, options: Options) -> None:
    for rank in words:
        fleet.fail_collective(int(rank), **_numbers(options))


def _seal(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``seal 5 digests=a,a,b``: the version after step 5 by all ranks, with a digest for each."""
    digests = dict(enumerate(options.pop("digests").split(","))) if "digests" in options else None
    fleet.seal(int(words[0]), *map(int, words[1:]), digests=digests, copied=True, **_numbers(options))


def _audit(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``audit 2 step=12 used=a again=a others=b,b``: an audit of rank 2's work found a difference.

    ``used`` and ``again`` are the owner's results, ``others`` those of the peer and the arbiter. ``audit`` and ``unit``
    name the work, ``difference`` the bits.
    """
    others = options.pop("others", "").split(",")
    more: dict[str, Any] = {name: options[name] for name in ("unit", "difference", "job") if name in options}
    if "unit" in more:
        more["unit"] = more["unit"].replace("_", " ")
    if "difference" in more:
        more["difference"] = more["difference"].replace("_", " ")
    if "wrong_results" in options:
        more["wrong_results"] = int(options["wrong_results"])
    if "audit" in options:
        more["audit"] = AuditKind(options["audit"])
    used, again = options.get("used", ""), options.get("again", "")
    fleet.audit(int(words[0]), int(options["step"]), used, again, *filter(None, others), **more)


def _resume(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``resume step=6 restored=1:5 job=train``: all ranks of the current generation step."""
    restored = None
    if "restored" in options:
        generation, step = options.pop("restored").split(":")
        restored = Version(int(generation), int(step))
    fleet.resume(restored=restored, **_numbers(options))


def _train(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``train 20 slow=2 by=4``: twenty seconds of steps, in which the others wait for rank 2, four times as long busy.

    ``slow=all``: all ranks are slow. ``from=41``: the step before, for a new controller that knows of none.
    """
    if "from" in options:
        fleet.progress(int(options["from"]), job=options.get("job", "job"))
    slow, by = options.get("slow", ""), float(options.get("by", "1"))
    busy = {rank: by for rank in range(64) if slow == "all" or slow == str(rank)}
    fleet.train(int(words[0]), busy, job=options.get("job", "job"))


def _stall(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``stall 0 1 still at=train.py:16``: ranks that stand still; without a state they wait in a collective."""
    *ranks, state = words if not words[-1].isdigit() else (*words, RankActivity.COLLECTIVE)
    activity = RankActivity(state)
    for rank in ranks:
        fleet.stall(
            int(rank),
            int(options.get("step", "5")),
            int(options.get("collectives", "10")),
            activity=activity,
            place=options.get("at", "train.py:17"),
            operation=options.get("in", "all_reduce") if activity is RankActivity.COLLECTIVE else "",
            doing="computes" if activity is RankActivity.WORKING else "",
            waits_for_all=activity is RankActivity.COLLECTIVE,
        )


def _order(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``operator drain n1``, ``operator stop_job train``, ``operator maintenance rack=A in=30 seconds=60``."""
    subject: dict[str, object] = {}
    if len(words) > 1:
        subject = {"node": words[1]} if words[1] in fleet.state.nodes or words[1][1:].isdigit() else {"job": words[1]}
    begins = fleet.now + float(options.pop("in", "0"))
    if begins > fleet.now:
        subject["starts_at"] = begins
    if "seconds" in options:
        subject["until"] = begins + float(options.pop("seconds"))
    fleet.order(OperatorAction(words[0]), **subject, **_numbers(options))


def _observe(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``observe n2 is reseating a cable by=maria``: the scheduler shows a cordon of hers; without ``by``, none."""
    event = SchedulerStateChanged(node=words[0], cordoned_by=options.get("by", ""), reason=" ".join(words[1:]))
    fleet.feed(event)


def _why(fleet: CoreFleet, words: Words, options: Options) -> Words:
    """``why n5``: the explanation of why the node has no seat."""
    words = [
        no_seat_reason(fleet.state, fleet.job(options.get("job", "job")), node) or "it has a seat" for node in words
    ]
    return [f"answer: {line}" for line in words]


def _restorable(fleet: CoreFleet, words: Words, options: Options) -> Words:
    """``restorable rack:A n3``: the version to restore, and the consequences of these losses."""
    found = compute_restorability(fleet.state, fleet.job(options.get("job", "job")))
    asked = [
        forecast.sentence
        for forecast in found.loss_forecasts
        if forecast.name in words or f"{forecast.kind}:{forecast.name}" in words
    ]
    return [f"answer: {line}" for line in (found.sentence, *asked)]


def _budget(fleet: CoreFleet, _words: Words, _options: Options) -> Words:
    """``budget``: the evictions that are left."""
    reason = fleet.state.fleet.breaker_reason
    breaker = [f"breaker: {reason}"] if reason else []
    return [
        *breaker,
        *(
            f"budget of {s.describe()}: {s.used} of {s.limit} used"
            for s in eviction.eviction_scopes(fleet.state, fleet.now)
        ),
    ]


def _remembered(fleet: CoreFleet, words: Words, _options: Options) -> Words:
    """``remembered n1``: how much is kept of the node."""
    record, live = fleet.state.nodes[words[0]], fleet.state.node_runtime[words[0]]
    stored = len(msgspec.json.encode(record)) // 1000 + 1
    return [
        f"{len(record.health.agent_findings)} findings, {len(record.history.counted_reports)} counts of reports, "
        f"{len(record.history.entries)} notes, "
        f"{len(live.finding_bursts)} bursts, {len(fleet.state.shared_findings.sightings)} sightings in the fleet; "
        f"its record is less than {stored} kB"
    ]


def _states(fleet: CoreFleet, words: Words, _options: Options) -> Words:
    """``states n1..n4``: the present state of each node."""
    return [f"{node} is {fleet.node_state(node)}" for node in words]


def _policy(fleet: CoreFleet, _words: Words, options: Options) -> None:
    """``policy remediation.mode=enforce``: other knobs than the lab's."""
    fleet.policy = fleet.state.policy = apply_change(fleet.policy, PolicyChange(knobs=dict(options)))


def _rule(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``rule rank.straggler mode=enforce``: the rule of that id as a site would override it."""
    rules = fleet.policy.rules
    kinds = {
        kind: tuple(
            msgspec.convert(msgspec.to_builtins(rule) | options, VerdictRule) if rule.id in words else rule
            for rule in of
        )
        for kind, of in rules.rules_by_kind.items()
    }
    fleet.policy = fleet.state.policy = msgspec.structs.replace(fleet.policy, rules=Rulebook(kinds))


def _store(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``store away because`` or ``store back``."""
    away = words[0] == "away"
    fleet.feed(
        DatabaseAvailabilityChanged(
            is_unavailable=away, reason=" ".join(words[1:]) or "connection refused" if away else ""
        )
    )


def _restart(fleet: CoreFleet, _words: Words, options: Options) -> None:
    """``restart clock=+3600``: the next life of the controller, with a clock that is so much later, or earlier.

    Its time begins as the shell lets it: by the clock, and never before what was recorded.
    """
    machine = ManualClock(wall=fleet.now + float(options.get("clock", "0")))
    fleet.now = SteadyTime(machine, not_before=fleet.now).now()
    fleet.epoch = (fleet.epoch or EPOCH) + 1
    fleet.restart()


def followed(fleet: CoreFleet) -> CoreFleet:
    """Start another controller from the stored state of this one, which continues beside it."""
    fleet.epoch = fleet.state.epoch = fleet.epoch or EPOCH
    other = deepcopy(fleet)
    other.epoch += 1
    other.restart()
    return other


COMMANDS: dict[str, Callable[[CoreFleet, Words, Options], object]] = {
    "start": lambda fleet, words, options: fleet.start(int(words[0]), **_numbers(options)),
    "register": _register,
    "beat": lambda fleet, words, _: [fleet.beat(node) for node in words],
    "wait": _wait,
    "disconnect": lambda fleet, words, _: [fleet.disconnect(node) for node in words],
    "hear": lambda fleet, words, _: [fleet.mark_seen(node) for node in words],
    "lose-peer": lambda fleet, words, options: fleet.lose_peer(words[0], words[1], **options),
    "xid": _raise_xid,
    "clear-xid": lambda fleet, words, options: [fleet.clear_finding(node, _xid(options).key) for node in words],
    "find": lambda fleet, words, options: fleet.raise_finding(words[0], _finding(words, options)),
    "clear": lambda fleet, words, options: fleet.clear_finding(words[0], _finding(words, options).key),
    "flap": _flap,
    "storm": _storm,
    "solos": _solos,
    "probe": _probe,
    "answer": _answer,
    "action": _action,
    "join": _join,
    "rejoin": lambda fleet, words, options: fleet.join(*words, again=True, **_numbers(options)),
    "leave": lambda fleet, words, options: fleet.leave(words[0], orderly="orderly" in words, **options),
    "lose-rank": _lose_rank,
    "fail-collective": _fail_collective,
    "stall": _stall,
    "unresponsive": lambda fleet, words, _: fleet.unresponsive(int(words[0])),
    "seal": _seal,
    "audit": _audit,
    "audited": lambda fleet, words, options: fleet.audited(*map(int, words), **_numbers(options)),
    "resume": _resume,
    "progress": lambda fleet, words, options: fleet.progress(int(words[0]), **_numbers(options)),
    "train": _train,
    "user-error": lambda fleet, words, _: fleet.raise_user_error(int(words[0])),
    "finish": lambda fleet, words, options: fleet.finish(*map(int, words), **_numbers(options)),
    "operator": _order,
    "observe": _observe,
    "why": _why,
    "restorable": _restorable,
    "budget": _budget,
    "states": _states,
    "remembered": _remembered,
    "policy": _policy,
    "rule": _rule,
    "store": _store,
    "stop-controller": lambda fleet, words, _: fleet.stop_controller(float(words[0])),
    "restart": _restart,
}
