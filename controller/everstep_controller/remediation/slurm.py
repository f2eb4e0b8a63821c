"""Remediate nodes through Slurm: ``scontrol`` drains them with our reason, resumes and reboots them.

A reboot's reason contains the previous boot time as reported by Slurm, and a later boot time confirms the reboot. This
needs only Slurm's clock, and any later controller finds the request in Slurm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from everstep.errors import ConfigurationError, Conflict, Unavailable
from everstep.ids import NodeId
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus, cordon_reason, foreign_cordon

TIMEOUT_S = 10.0
UNSCHEDULABLE_STATES = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "MAINTENANCE"})
"""Flags of a node that takes no new jobs by request (``scontrol`` manual, NODE STATES). A reservation is none: jobs run
in it."""
SLURM_REASONS = re.compile(
    "Not responding|Node unexpectedly rebooted|ResumeTimeout reached|Reboot ASAP|reboot timed out|Low |gres/|"
    "Epilog error|Prolog error|Duplicate jobid|Kill task failed|batch job complete failure|Powered down"
)
"""Beginnings of slurmctld's own reasons for a ``DOWN`` node (its strings). Any other reason is a person's."""
REBOOT_STATES = frozenset({"REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED"})
BOOT_JITTER_S = 5.0
"""Seconds by which reported times of one boot may differ: Slurm recomputes them from the node's uptime and its own
clock whenever the node registers."""
_FIELD = re.compile(r"(?:^|\s)(\w+)=")
_REBOOT = re.compile(rf"{CORDON_OWNER} (\S+) after boot of (\S+): ")
_UNKNOWN = re.compile(r"Node \S+ not found")
_REFUSED = re.compile(
    "Invalid node name specified|Invalid user id|error: Permission denied|Access/permission denied|"
    "RebootProgram isn't defined|Requested operation not supported"
)
"""Messages of ``scontrol`` for which a retry is useless. Any other may be temporary (slurmctld down, a backup in
standby, munge unavailable, texts of another release)."""


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as shown by ``scontrol show node``."""

    states: frozenset[str]
    reason: str
    booted_at: float  # wall seconds; 0.0 if unknown

    @property
    def is_unschedulable(self) -> bool:
        by_operator = bool(self.reason) and not self.is_ours and not SLURM_REASONS.match(self.reason)
        return bool(self.states & UNSCHEDULABLE_STATES) or ("DOWN" in self.states and by_operator)

    @property
    def is_left_down(self) -> bool:
        """Whether the node is down after a reboot of Everstep's, until it is resumed."""
        return "DOWN" in self.states and self.is_ours

    @property
    def is_ours(self) -> bool:
        return self.reason.startswith(CORDON_OWNER)

    def boot_before(self, remediation: Remediation) -> float | None:
        """Return the boot time before the reboot ``remediation`` in wall seconds, or None if it was not requested."""
        found = _REBOOT.match(self.reason)
        return _wall(found[2]) if found and found[1] == remediation.id else None


def parse_node(line: str) -> SlurmNode:
    """Parse one line of ``scontrol --oneliner show node``."""
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
    """Return wall seconds; ``scontrol`` prints UTC without a zone, as its environment requests."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


class SlurmRemediator:
    """Implements ``Remediator`` for nodes named as in Slurm. Raises ConfigurationError without ``scontrol``."""

    name = "slurm"
    dry_run = False
    kinds = frozenset(RemediationKind) - {RemediationKind.RESET_GPU}

    def __init__(self, scontrol: str = "scontrol", configuration: str = "") -> None:
        found = shutil.which(scontrol)
        if found is None:
            raise ConfigurationError(f"{scontrol!r} is not installed on this machine: install Slurm's client programs")
        self._scontrol = found
        self._environment = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
        if configuration:
            self._environment["SLURM_CONF"] = configuration

    def apply(self, remediation: Remediation) -> None:
        if self.is_done(remediation):
            return
        node = self._show(remediation.node)
        if node.is_unschedulable and not node.is_ours:
            raise foreign_cordon(remediation.node, node.reason or "no reason given")
        match remediation.kind:
            case RemediationKind.CORDON | RemediationKind.REPAIR:
                reason = f"Reason={_plain(cordon_reason(remediation))}"
                self._run("update", f"NodeName={remediation.node}", "State=DRAIN", reason)
            case RemediationKind.UNCORDON:
                self._run("update", f"NodeName={remediation.node}", "State=RESUME")
            case RemediationKind.REBOOT:
                if node.boot_before(remediation) is not None:
                    return
                if node.states & REBOOT_STATES:
                    raise Unavailable(
                        f"{remediation.node} is being rebooted for another reason ({node.reason or 'none given'})"
                    )
                booted = datetime.fromtimestamp(node.booted_at, UTC).replace(tzinfo=None).isoformat(timespec="seconds")
                reason = f"{CORDON_OWNER} {remediation.id} after boot of {booted}: {remediation.sentence}"[:256]
                self._run("reboot", "ASAP", "nextstate=DOWN", f"reason={_plain(reason)}", remediation.node)
            case _:
                raise Conflict(f"slurm cannot {remediation.kind}")

    def is_done(self, remediation: Remediation) -> bool:
        node = self._show(remediation.node)
        match remediation.kind:
            case RemediationKind.CORDON:
                return node.is_unschedulable
            case RemediationKind.REPAIR:
                return node.is_unschedulable and node.reason.startswith(f"{CORDON_OWNER} {remediation.id}:")
            case RemediationKind.UNCORDON:
                return not node.is_unschedulable and not node.is_left_down
            case RemediationKind.REBOOT:
                before = node.boot_before(remediation)
                is_back = not node.states & REBOOT_STATES
                return before is not None and is_back and node.booted_at > before + BOOT_JITTER_S
            case _:
                return False

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        wanted = set(nodes)
        found: dict[NodeId, CordonStatus] = {}
        for line in self._run("--oneliner", "show", "nodes").splitlines():
            name = line.partition("NodeName=")[2].partition(" ")[0]
            if name in wanted:
                found[name] = _cordon_status(parse_node(line))
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
                encoding="utf-8",
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"scontrol did not answer within {TIMEOUT_S:g} s") from error
        output = " ".join((done.stderr or done.stdout).split())
        is_known = _UNKNOWN.fullmatch(output) is None
        if done.returncode == 0 and is_known:
            return done.stdout
        failure = output[-400:] or f"exit status {done.returncode}"
        if not is_known or _REFUSED.search(output):
            raise Conflict(f"scontrol {arguments[0]} was refused: {failure}")
        raise Unavailable(f"scontrol {arguments[0]} failed: {failure}")


def _plain(reason: str) -> str:
    return reason.replace("=", ":")  # "=" would start a field


def _cordon_status(node: SlurmNode) -> CordonStatus:
    if not node.is_unschedulable and not node.is_left_down:
        return CordonStatus()
    return CordonStatus(cordoned_by=CORDON_OWNER if node.is_ours else "slurm", reason=node.reason)
