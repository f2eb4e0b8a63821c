"""Say what harm a run did to a program that did nothing wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bench.calm.launched_run import Evidence
from bench.calm.program import Program
from everstep.vocabulary import FindingKind
from everstep.wire.v1.operator import Event


class Harm(StrEnum):
    """A kind of harm."""

    KILLED = "ranks killed"
    REGROUPED = "regroups"
    FAILED = "jobs failed"
    ACCUSED = "nodes accused"
    EFFECTS = "side effects not done exactly as often as asked"
    FILES = "files damaged"
    LOSSES = "runs unlike torchrun's"
    SENTENCES = "sentences that accuse"
    LEFT = "processes and memory left behind"


@dataclass(frozen=True)
class Harmed:
    """One kind of harm to one program. ``count`` is in the kind's unit."""

    harm: Harm
    count: int
    sentence: str


ACCUSING_EVENTS = (
    "verdict.",
    "corruption.",
    "audit.suspicion",
    "blame_isolation.",
    "node.lost",
    "node.evict",
    "rank.hung",
    "rank.lost",
    "fleet.breaker_tripped",
)
"""Prefixes of kinds of events that say that something is wrong with a node or a rank."""
ACQUITTALS = ("verdict.no_action", "verdict.readmit")
ACCUSING_FINDINGS = (
    FindingKind.RANK_FLAPPING,
    FindingKind.NODE_FLAPPING,
    FindingKind.DIGEST_MISMATCH,
    FindingKind.AUDIT_MISMATCH,
    FindingKind.COMPUTE_WRONG,
    FindingKind.MEMORY_WRONG,
    FindingKind.SLOT_CORRUPT,
    FindingKind.TRANSFER_CORRUPT,
    FindingKind.STORAGE_CORRUPT,
    FindingKind.VAULT_LOST,
    FindingKind.GPU_LOST,
)
ACCUSING_WORDS = re.compile(
    r"\bhung\b|treated as a hang|counts as hung|\bis killed\b|\bkilled and replaced|\bkilling\b|SIGKILL|SIGBUS"
    r"|computes? wrongly|corrupt|\bevict|quarantin|out of service|faulty|does not answer|unresponsive",
    re.IGNORECASE,
)
"""Words in lines of the log that accuse a rank or a node."""
NOT_EVERSTEP = re.compile(r"^sample \d+:")
"""Lines that a program itself prints."""


def find_harm(program: Program, found: list[Evidence], plain: Evidence | None = None) -> list[Harmed]:
    """Return all harm to a program.

    Args:
        program: The program.
        found: What each of its jobs left.
        plain: What it left under torchrun; None: it is not compared.
    """
    return [harmed for evidence in found for harmed in _of_one_job(program, evidence, plain)]


def _of_one_job(program: Program, evidence: Evidence, plain: Evidence | None) -> Iterator[Harmed]:
    if killed := killed_ranks(evidence, was_stopped=evidence.status != program.status):
        named = ", ".join(f"rank {rank}" for rank, _ in killed)
        yield Harmed(Harm.KILLED, len(killed), f"{named} did not leave the training function")
    if regroups := max((note["generation"] for note in evidence.of_kind("began")), default=1) - 1:
        yield Harmed(Harm.REGROUPED, regroups, f"{regroups} regroups")
    if evidence.status != program.status:
        status = f"status {evidence.status}" if evidence.status is not None else f"no end in {program.limit_s:g} s"
        yield Harmed(Harm.FAILED, 1, f"{status}: {last_line(evidence)}")
    accused = [event for event in until_the_end(evidence.events) if is_accusation(event.kind, event.detail)]
    if accused:
        nodes = {event.node or event.job for event in accused}
        kinds = ", ".join(sorted({event.kind for event in accused}))
        yield Harmed(Harm.ACCUSED, len(nodes), f"{kinds}: {accused[0].sentence}")
    for name, asked in program.effects.items():
        begun, done = (
            Counter(note["name"] for note in evidence.of_kind(kind))[name] for kind in ("effect begun", "effect")
        )
        if (begun, done) != (asked, asked):
            yield Harmed(Harm.EFFECTS, 1, f"{name}: asked for {asked}, begun {begun}, done {done}")
    if evidence.check:
        yield Harmed(Harm.FILES, 1, evidence.check)
    if plain is not None and program.is_comparable and (difference := differs(evidence, plain)):
        yield Harmed(Harm.LOSSES, 1, difference)
    if lines := accusing_lines(evidence.output):
        yield Harmed(Harm.SENTENCES, len(lines), lines[0])
    if evidence.left:
        yield Harmed(Harm.LEFT, len(evidence.left), ", ".join(evidence.left))


def killed_ranks(evidence: Evidence, *, was_stopped: bool = False) -> list[tuple[int, int]]:
    """Return rank and pid of the processes that entered the training function and never left it.

    Args:
        evidence: What the job left.
        was_stopped: The job was stopped with an error, which ends the last process of each rank.
    """
    began = dict.fromkeys((note["rank"], note["pid"]) for note in evidence.of_kind("began"))
    ended = {(note["rank"], note["pid"]) for note in evidence.of_kind("ended")}
    if was_stopped:
        ended |= set(dict(began.keys()).items())
    return [process for process in began if process not in ended]


def until_the_end(events: list[Event]) -> Iterator[Event]:
    """Yield events until the launcher has left; then its private agent ends, and the controller sees that, too."""
    for event in events:
        yield event
        if event.kind == "launcher.left":
            return


def is_accusation(kind: str, detail: dict[str, str]) -> bool:
    """Return whether an event says that something is wrong with a node or a rank."""
    if kind == "finding":
        return detail.get("key", "").startswith(tuple(f"{kind_name}/" for kind_name in ACCUSING_FINDINGS))
    return kind.startswith(ACCUSING_EVENTS) and not kind.startswith(ACQUITTALS)


def accusing_lines(output: str) -> list[str]:
    """Return the lines of a log that accuse a rank or a node."""
    lines = (line.strip() for line in output.splitlines() if not NOT_EVERSTEP.match(line))
    return [line for line in lines if ACCUSING_WORDS.search(line)]


def differs(evidence: Evidence, plain: Evidence) -> str:
    """Say where losses and final parameters differ from torchrun's; empty if they are equal."""
    if plain.status != 0:
        return f"torchrun ended with status {plain.status}"
    ours, theirs = evidence.losses(), plain.losses()
    for step in sorted(ours.keys() | theirs.keys()):
        if ours.get(step) != theirs.get(step):
            return f"loss of step {step} is {ours.get(step)}, under torchrun {theirs.get(step)}"
    if evidence.digests() != plain.digests():
        return f"final parameters {evidence.digests()}, under torchrun {plain.digests()}"
    return ""


def last_line(evidence: Evidence) -> str:
    """Return the reason of the end, as the receipt or the log has it."""
    if evidence.receipt is not None and evidence.receipt.sentence:
        return evidence.receipt.sentence
    lines = [line.strip() for line in evidence.output.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was printed"
