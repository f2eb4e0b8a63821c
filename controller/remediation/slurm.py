"""Slurm: nodes are drained with our reason, resumed, and rebooted by ``scontrol``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime

import msgspec

from controller.core.effects import Remedy, RemedyKind
from controller.remediation.base import MARK, Standing, reason_of
from everstep.errors import ConfigurationError, Conflict, Unavailable
from everstep.ids import NodeId

TIMEOUT_S = 10.0
OUT = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "RESERVED"})
"""Flags of a node that takes no new jobs because somebody said so (``scontrol`` manual, NODE STATES)."""
REBOOTING = frozenset({"REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED"})
_FIELD = re.compile(r"(?:^|\s)(\w+)=")
_GONE = ("Unable to contact slurm controller", "Connection refused", "timed out", "Socket timed out")


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as ``scontrol show node`` tells of it. ``booted_at``: wall seconds, 0.0 where it is not known."""

    states: frozenset[str]
    reason: str
    booted_at: float

    @property
    def is_out(self) -> bool:
        return bool(self.states & OUT)

    @property
    def is_ours(self) -> bool:
        return self.reason.startswith(MARK)


def parse_node(line: str) -> SlurmNode:
    """One line of ``scontrol --oneliner show node``."""
    places = list(_FIELD.finditer(line))
    ends = [place.start() for place in places[1:]] + [len(line)]
    fields = {place[1]: line[place.end() : end].strip() for place, end in zip(places, ends, strict=True)}
    reason, _, _ = fields.get("Reason", "").rpartition(" [")
    return SlurmNode(
        states=frozenset(re.split(r"[+*~#!%$@^-]+", fields.get("State", ""))) - {""},
        reason=reason or fields.get("Reason", ""),
        booted_at=_wall(fields.get("BootTime", "")),
    )


def _wall(text: str) -> float:
    """Slurm says local time without a zone."""
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return 0.0


class Slurm:
    """Satisfies ``Remediator``. A node's name is its name in Slurm.

    Args:
        scontrol: the program; Raises ConfigurationError where it is not there.
        configuration: Slurm's configuration file, empty for Slurm's own default.
    """

    name = "slurm"
    kinds = frozenset({RemedyKind.CORDON, RemedyKind.UNCORDON, RemedyKind.REBOOT, RemedyKind.REPAIR})

    def __init__(self, scontrol: str = "scontrol", configuration: str = "") -> None:
        found = shutil.which(scontrol)
        if found is None:
            raise ConfigurationError(f"{scontrol!r} is not on this machine: install Slurm's client programs")
        self._scontrol = found
        self._environment = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
        if configuration:
            self._environment["SLURM_CONF"] = configuration

    def apply(self, remedy: Remedy) -> None:
        if self.is_done(remedy):
            return
        node, reason = self._show(remedy.node), reason_of(remedy).replace("=", ":")  # it would read as a field
        match remedy.kind:
            case RemedyKind.CORDON | RemedyKind.REPAIR:
                self._check_ours(node, remedy)
                self._run("update", f"NodeName={remedy.node}", "State=DRAIN", f"Reason={reason}")
            case RemedyKind.UNCORDON:
                self._check_ours(node, remedy)
                self._run("update", f"NodeName={remedy.node}", "State=RESUME")
            case RemedyKind.REBOOT:
                if not node.states & REBOOTING:
                    self._run("reboot", "ASAP", "nextstate=DOWN", f"reason={reason}", remedy.node)
            case _:
                raise Conflict(f"slurm cannot {remedy.kind}")

    def is_done(self, remedy: Remedy) -> bool:
        node = self._show(remedy.node)
        match remedy.kind:
            case RemedyKind.CORDON:
                return node.is_out
            case RemedyKind.REPAIR:
                return node.is_out and node.reason.startswith(f"{MARK} {remedy.id}:")
            case RemedyKind.UNCORDON:
                return not node.is_out and not ("DOWN" in node.states and node.is_ours)
            case RemedyKind.REBOOT:
                return node.booted_at > remedy.at and not node.states & REBOOTING
            case _:
                return False

    @staticmethod
    def _check_ours(node: SlurmNode, remedy: Remedy) -> None:
        if node.is_out and not node.is_ours:
            raise Conflict(f"{remedy.node} is out of service by somebody else ({node.reason or 'no reason given'})")

    def standing(self, nodes: Sequence[NodeId]) -> dict[NodeId, Standing]:
        wanted = set(nodes)
        found: dict[NodeId, Standing] = {}
        for line in self._run("--oneliner", "show", "nodes").splitlines():
            name = line.partition("NodeName=")[2].partition(" ")[0]
            if name in wanted:
                found[name] = _standing(parse_node(line))
        return found

    def close(self) -> None:
        pass

    def _show(self, node: NodeId) -> SlurmNode:
        return parse_node(self._run("--oneliner", "show", "node", node))

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self._scontrol, *arguments],
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"scontrol did not answer within {TIMEOUT_S:g} s") from error
        words = " ".join((done.stderr or done.stdout).split())[:400]
        if done.returncode == 0 and "not found" not in words:
            return done.stdout
        if any(sign in words for sign in _GONE):
            raise Unavailable(f"slurm is away: {words}")
        raise Conflict(f"scontrol {arguments[0]} was refused: {words}")


def _standing(node: SlurmNode) -> Standing:
    if not node.is_out:
        return Standing()
    return Standing(cordoned_by=MARK if node.is_ours else "slurm", reason=node.reason)
