"""Transcripts: prose that says what is proved, commands, and the decisions they lead to.

A line that begins with ``>`` is a command, the lines below it are what the core decided; ``> quietly ...`` leaves
these out. Everything before the first command is prose.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from controller.core.describe import describe
from controller.core.effects import RequestRemedy
from controller.core.events import ActionReported, NodeObserved, OperatorAction, StoreChanged
from controller.core.policy import CorePolicy
from everstep.errors import EverstepError
from everstep.ids import Version
from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import ProbeFinished
from tests.support.core_fleet import CoreFleet, xid

Words = list[str]
Options = dict[str, str]


def rewritten(text: str) -> str:
    """The transcript with the decisions as they are today."""
    fleet, out = CoreFleet(), []
    prose, commands = _parse(text)
    for command in commands:
        before = len(fleet.effects)
        quiet, words, options = _split(command)
        refusal = _run(fleet, words, options)
        lines = [] if quiet else [*refusal, *describe(fleet.effects[before:])]
        out.append("\n".join([f"> {command}", *(lines or ([] if quiet else ["nothing"]))]))
    return prose + "\n" + "\n\n".join(out) + "\n"


def _run(fleet: CoreFleet, words: Words, options: Options) -> Words:
    try:
        COMMANDS[words[0]](fleet, words[1:], options)
    except EverstepError as error:
        return [f"refused ({error.code}): {error}"]
    return []


def _parse(text: str) -> tuple[str, Words]:
    head = text.index("\n> ") + 1
    return text[:head].rstrip() + "\n", [line[2:] for line in text[head:].splitlines() if line.startswith("> ")]


def _split(command: str) -> tuple[bool, Words, Options]:
    words = command.split()
    quiet = words[0] == "quietly"
    words = words[1:] if quiet else words
    options = dict(word.split("=", 1) for word in words if "=" in word)
    return quiet, [word for word in words if "=" not in word], options


# --- commands ----------------------------------------------------------------------------------------------------


def _start(fleet: CoreFleet, words: Words, options: Options) -> None:
    shape = {key: int(value) for key, value in options.items()}
    fleet.start(int(words[0]), shape.pop("spares", 0), **shape)


def _register(fleet: CoreFleet, words: Words, options: Options) -> None:
    domain = Domain(**{key: value for key, value in options.items() if key in ("rack", "switch", "power")})
    fleet.register(*words, domain=domain, **{key: value for key, value in options.items() if key == "boot_id"})


def _join(fleet: CoreFleet, words: Words, options: Options) -> None:
    fleet.join(*words, **{key: int(value) for key, value in options.items()})


def _wait(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``wait 3 n1 n2``: three seconds, with heartbeats of n1 and n2; ``wait 3 but n4``: of all others."""
    beating = words[1:]
    if beating[:1] == ["but"]:
        beating = [node for node in fleet.state.nodes if node not in beating]
    fleet.advance(float(words[0]), *beating)


def _lose_rank(fleet: CoreFleet, words: Words, options: Options) -> None:
    generation = int(options["generation"]) if "generation" in options else None
    fleet.lose_rank(int(words[0]), replacement=options.get("replacement") != "no", generation=generation)


def _fail_collective(fleet: CoreFleet, words: Words, options: Options) -> None:
    generation = int(options["generation"]) if "generation" in options else None
    for rank in words:
        fleet.fail_collective(int(rank), generation=generation)


def _seal(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``seal 5 digests=a,a,b``: the version after step 5 by all ranks, with a digest for each."""
    digests = dict(enumerate(options["digests"].split(","))) if "digests" in options else None
    fleet.seal(int(words[0]), *map(int, words[1:]), digests=digests)


def _resume(fleet: CoreFleet, words: Words, options: Options) -> None:
    restored = None
    if "restored" in options:
        generation, step = options["restored"].split(":")
        restored = Version(int(generation), int(step))
    fleet.resume(restored=restored, step=int(options.get("step", "1")))


def _stall(fleet: CoreFleet, words: Words, options: Options) -> None:
    for rank in words:
        fleet.stall(int(rank), int(options.get("step", "5")), int(options.get("collectives", "10")))


def _order(fleet: CoreFleet, words: Words, options: Options) -> None:
    subject: dict[str, object] = {}
    if len(words) > 1:
        subject = {"node": words[1]} if words[1].startswith("n") else {"job": words[1]}
    if "rack" in options:
        subject["rack"] = options.pop("rack")
    if "seconds" in options:
        subject["until"] = fleet.now + float(options.pop("seconds"))
    fleet.order(OperatorAction(words[0]), **subject, **{key: int(value) for key, value in options.items()})


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
    )


def _flap(fleet: CoreFleet, words: Words, options: Options) -> None:
    """``flap n1 600 every=0.1 kind=...``: so often raised and cleared."""
    finding = _finding(words[:1], options)
    for _ in range(int(words[1])):
        fleet.raise_finding(words[0], finding)
        fleet.clear_finding(words[0], finding.key)
        fleet.now += float(options["every"])


def _action(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``action n1 ok`` or ``action n1 failed because``: how the node's newest remedy ended."""
    remedies = [e.remedy for e in fleet.effects if isinstance(e, RequestRemedy) and e.remedy.node == words[0]]
    fleet.feed(ActionReported(id=remedies[-1].id, node=words[0], ok=words[1] == "ok", detail=" ".join(words[2:])))


def _answer(fleet: CoreFleet, words: Words, _options: Options) -> None:
    """``answer n1 ok``: both sides of the probe that tries n1 report it."""
    name, probe = next((n, p) for n, p in fleet.state.probes.items() if p.candidate == words[0])
    for node in probe.nodes:
        if name in fleet.state.probes:
            fleet.report(node, ProbeFinished(probe=name, ok=words[1] == "ok", detail=" ".join(words[2:])))


def _policy(fleet: CoreFleet, _words: Words, options: Options) -> None:
    """``policy remediate=enforce``: other knobs than the lab's."""
    knobs = msgspec.convert({**msgspec.structs.asdict(fleet.policy), **options}, CorePolicy, strict=False)
    fleet.policy = fleet.state.policy = knobs


COMMANDS: dict[str, Callable[[CoreFleet, Words, Options], object]] = {
    "start": _start,
    "register": _register,
    "join": _join,
    "rejoin": lambda fleet, words, options: fleet.join(*words, again=True, generation=int(options["generation"])),
    "leave": lambda fleet, words, _: fleet.leave(words[0], orderly="orderly" in words),
    "beat": lambda fleet, words, _: [fleet.beat(node) for node in words],
    "wait": _wait,
    "disconnect": lambda fleet, words, _: fleet.disconnect(words[0]),
    "hear": lambda fleet, words, _: fleet.hear(words[0]),
    "lose-rank": _lose_rank,
    "fail-collective": _fail_collective,
    "stall": _stall,
    "unresponsive": lambda fleet, words, _: fleet.unresponsive(int(words[0])),
    "seal": _seal,
    "resume": _resume,
    "progress": lambda fleet, words, _: fleet.progress(int(words[0])),
    "xid": lambda fleet, words, options: fleet.raise_finding(words[0], xid(int(options.get("number", "79")))),
    "clear-xid": lambda fleet, words, options: fleet.clear_finding(words[0], xid(int(options.get("number", "79"))).key),
    "lose-peer": lambda fleet, words, _: fleet.lose_peer(words[0], words[1]),
    "stop-controller": lambda fleet, words, _: fleet.stop_controller(float(words[0])),
    "store": lambda fleet, words, _: fleet.feed(StoreChanged(away=words[0] == "away", reason="connection refused")),
    "probe": lambda fleet, words, _: fleet.probe_result(words[0], words[1] == "ok", " ".join(words[2:])),
    "operator": _order,
    "user-error": lambda fleet, words, _: fleet.raise_user_error(int(words[0])),
    "finish": lambda fleet, words, _: fleet.finish(*map(int, words)),
    "find": lambda fleet, words, options: fleet.raise_finding(words[0], _finding(words, options)),
    "clear": lambda fleet, words, options: fleet.clear_finding(words[0], _finding(words, options).key),
    "flap": _flap,
    "action": _action,
    "answer": _answer,
    "policy": _policy,
    "observe": lambda fleet, words, options: fleet.feed(NodeObserved(node=words[0], cordoned_by=options.get("by", ""))),
    "restart": lambda fleet, words, _: fleet.restart(),
}
