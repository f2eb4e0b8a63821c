"""Check that remediations follow from a verdict, are written before they are requested, are done once, and keep caps.

No node is reset or repaired that an operator, a maintenance window or a foreign cordon keeps out of service.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from everstep.vocabulary import Decision, NodeState
from everstep_controller.core.effects import DeleteNode, PutNode, Remediation, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, OperatorCommand, SchedulerStateChanged
from everstep_controller.core.records import NodeScheduling
from everstep_controller.store.rows import RemediationRow, RemediationState
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.checkers.window_tracker import WindowTracker
from tests.sim.cluster.observations import (
    BatchWritten,
    LeaderDecided,
    LeaderStarted,
    RemediationPerformed,
    RemediationReadBack,
    RemediationRequested,
)

RESETS = (RemediationKind.RESET_GPU, RemediationKind.REBOOT)
"""Kinds that are limited by caps."""
ENDED = (RemediationState.CONFIRMED, RemediationState.FAILED, RemediationState.SUPERSEDED)
"""Final states of a remediation."""
EXCLUDING = (Decision.EVICT, Decision.QUARANTINE, Decision.REPAIR)
"""Decisions that may lead to a reset or a repair."""
SERVING = (NodeState.HEALTHY, NodeState.PROBATION)
"""States of nodes that are in service or return to it."""


class Remediations(Checker):
    """Follow every remediation from the decision to the action on the machine."""

    name = "remediations"

    def __init__(self) -> None:
        self._rows: dict[str, RemediationRow] = {}
        self._started_in: dict[str, int] = {}
        self._verdicts: dict[str, tuple[str, str]] = {}
        self._resets: dict[str, list[float]] = defaultdict(list)
        self._requested: set[tuple[int, str]] = set()
        self._read_back: set[tuple[int, str]] = set()
        self._done: set[str] = set()
        self._records = StoredRecords()
        self._kept_out: dict[str, dict[str, float]] = defaultdict(dict)
        self._tracker = WindowTracker()

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
            RemediationRequested: self._on_request,
            RemediationReadBack: self._on_read_back,
            RemediationPerformed: self._on_action,
        }

    def remaining_problem(self) -> str:
        """Return a healthy node that is still cordoned, or the remediations that have not ended."""
        leader = self.world.leader()
        if leader is None:
            return "no controller leads"
        cordoned = self.world.scheduler.cordoned()
        for name, record in leader.state.nodes.items():
            if record.state is NodeState.HEALTHY and name in cordoned:
                return f"{name} is healthy, and cordoned by {cordoned[name]}"
        open_ids = [row.id for row in self._rows.values() if row.state not in ENDED]
        return f"{', '.join(open_ids)} did not end" if open_ids else ""

    def _on_leader(self, _start: LeaderStarted) -> None:
        """Begin from the stored records: the new leader knows only the commands that were written."""
        self._kept_out = defaultdict(
            dict, {node: _stored_reasons(record.scheduling) for node, record in self._records.nodes().items()}
        )
        self._tracker.start_leader()

    def _on_decision(self, decision: LeaderDecided) -> None:
        self._note_reasons(decision)
        self._tracker.note_command(decision)
        is_command = isinstance(decision.event, OperatorCommand)
        for effect in decision.effects:
            self._tracker.note_effect(effect, decision.at)
        for effect in decision.effects:
            if isinstance(effect, RequestRemediation) and not is_command:
                self._check_request(effect.remediation, decision.at)
            elif isinstance(effect, PutNode):
                self._check_record(effect, decision.at)
            elif isinstance(effect, DeleteNode):
                self._kept_out.pop(effect.node, None)

    def _note_reasons(self, decision: LeaderDecided) -> None:
        """Note the commands and cordons that keep a node out of service."""
        event = decision.event
        if isinstance(event, SchedulerStateChanged):
            self._kept_out[event.node].pop("a cordon", None)
            if event.cordoned_by:
                self._kept_out[event.node]["a cordon"] = float("inf")
        elif isinstance(event, OperatorCommand) and event.node is not None:
            reasons = self._kept_out[event.node]
            if event.action in (OperatorAction.HOLD, OperatorAction.DRAIN):
                reasons["an operator"] = float("inf")
            elif event.action in (OperatorAction.RELEASE, OperatorAction.READMIT):
                reasons.pop("an operator", None)

    def _reason_out(self, node: str, now: float) -> str:
        """Return the reason that keeps the node out of service, empty if there is none."""
        window = self._tracker.active(self.world, node, now)
        return next((reason for reason, until in self._kept_out[node].items() if now < until), str(window or ""))

    def _check_request(self, remediation: Remediation, now: float) -> None:
        reason = self._reason_out(remediation.node, now)
        if reason and (
            remediation.kind in (*RESETS, RemediationKind.REPAIR)
            or (reason == "a cordon" and remediation.kind is RemediationKind.CORDON)
        ):
            raise Violation(
                self.name, f"{remediation.kind} of {remediation.node} is requested, although {reason} keeps it out"
            )

    def _check_record(self, effect: PutNode, now: float) -> None:
        reason = self._reason_out(effect.node, now)
        if reason and effect.doc.state in SERVING:
            raise Violation(self.name, f"{effect.node} is {effect.doc.state}, although {reason} keeps it out")

    def _on_write(self, write: BatchWritten) -> None:
        self._tracker.note_write(write)
        self._records.note(write.batch)
        for verdict in write.batch.verdicts:
            self._verdicts[verdict.id] = (verdict.node, verdict.decision)
        for row in sorted(write.batch.remediations.values(), key=lambda row: row.requested_at):
            before = self._rows.get(row.id)
            if before is not None and before.state in ENDED:
                raise Violation(self.name, f"{row.id} is {row.state} after it was {before.state}")
            if before is None:
                self._check_verdict(row)
            if row.state is RemediationState.STARTED:
                self._started_in.setdefault(row.id, write.epoch)
            self._rows[row.id] = row

    def _check_verdict(self, row: RemediationRow) -> None:
        if row.kind in (*RESETS, RemediationKind.REPAIR):
            verdict = msgspec.json.decode(row.doc, type=Remediation).verdict_id
            node, decision = self._verdicts.get(verdict, ("", ""))
            if node != row.node or decision not in EXCLUDING:
                raise Violation(self.name, f"{row.id} ({row.kind} of {row.node}) follows from {decision or 'nothing'}")
        if row.kind in RESETS:
            self._check_caps(row)

    def _check_caps(self, row: RemediationRow) -> None:
        policy, at = self.world.plan.policy, row.requested_at
        caps = (
            (row.node, policy.remediation.per_node, policy.remediation.node_window_s),
            ("the fleet", policy.remediation.per_fleet, policy.remediation.fleet_window_s),
        )
        for scope, limit, window_s in caps:
            self._resets[scope] = [*(t for t in self._resets[scope] if t > at - window_s), at]
            if len(self._resets[scope]) > limit:
                raise Violation(
                    self.name,
                    f"{len(self._resets[scope])} resets of {scope} within {window_s:g} s, allowed are {limit}",
                )

    def _on_read_back(self, read_back: RemediationReadBack) -> None:
        self._read_back.add((read_back.epoch, read_back.remediation))

    def _on_request(self, request: RemediationRequested) -> None:
        title = f"{request.remediation} ({request.kind} of {request.node})"
        row = self._rows.get(request.remediation)
        if row is None or row.state is RemediationState.REQUESTED:
            raise Violation(self.name, f"{title} is requested before its start is written")
        if row.state in ENDED:
            raise Violation(self.name, f"{request.controller} requests {title}, which is {row.state}")
        key = (request.epoch, request.remediation)
        is_inherited = self._started_in[request.remediation] != request.epoch
        if is_inherited and key not in self._requested and key not in self._read_back:
            raise Violation(
                self.name, f"{request.controller} inherited {title}, and requests it without reading it back"
            )
        self._requested.add(key)

    def _on_action(self, action: RemediationPerformed) -> None:
        if action.remediation in self._done:
            raise Violation(self.name, f"{action.remediation} ({action.kind} of {action.node}) is done twice")
        self._done.add(action.remediation)
        record = self._records.node(action.node)
        if action.kind in RESETS and record is not None and record.state is NodeState.HEALTHY:
            raise Violation(self.name, f"{action.remediation}: {action.kind} of {action.node}, which is in service")


def _stored_reasons(scheduling: NodeScheduling) -> dict[str, float]:
    """Return the reasons in a node's record that keep it out, each with its end, as in ``Remediations._kept_out``."""
    values = {"an operator": scheduling.hold_reason, "a cordon": scheduling.external_cordon_by}
    return {reason: float("inf") for reason, value in values.items() if value}
