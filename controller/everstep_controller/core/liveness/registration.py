"""Register agents: a new node, a new incarnation of a known node, or a repeated registration."""

from __future__ import annotations

from collections.abc import Collection

from everstep.errors import NotFound, StaleGeneration
from everstep.vocabulary import Action, Decision, NodeState
from everstep.wire.v1.agent import Register
from everstep_controller.core.health import offences
from everstep_controller.core.health.outbreaks import blocks_service
from everstep_controller.core.health.quarantine import begin_quarantine, quarantine_before_service
from everstep_controller.core.judgement.findings import replace_agent_findings
from everstep_controller.core.judgement.verdicts import FindingReport, record_sighting
from everstep_controller.core.liveness import node_liveness, rejoin
from everstep_controller.core.liveness.correlation import add_expected, count_node, update_correlated_silence
from everstep_controller.core.maintenance import current_window, enter_maintenance
from everstep_controller.core.records import NodeIdentity, NodeRecord, UnfitNode
from everstep_controller.core.state import FleetState, HeartbeatState, NodeRuntime
from everstep_controller.core.transition import Transition


def check_incarnation(state: FleetState, node: str, incarnation: int) -> None:
    """Raise NotFound for an unregistered node, StaleGeneration for another incarnation than the registered one."""
    record = state.nodes.get(node)
    if record is None:
        raise NotFound(f"node {node} is not registered here: register first")
    if incarnation != record.identity.incarnation:
        raise StaleGeneration(
            f"incarnation {incarnation} of {node} is not the registered one ({record.identity.incarnation}): "
            "register first"
        )


def check_registration(state: FleetState, register: Register) -> None:
    """Raise StaleGeneration if a later incarnation of the node has registered."""
    record = state.nodes.get(register.node)
    if record is not None and register.incarnation < record.identity.incarnation:
        raise StaleGeneration(
            f"{register.node} has registered with a later incarnation ({record.identity.incarnation} > "
            f"{register.incarnation}): two agents run under one name, or this one should have ended"
        )


def register(transition: Transition, message: Register) -> None:
    """Add the node to the fleet, or update it."""
    record = transition.state.nodes.get(message.node)
    if record is None:
        _new_node(transition, message)
        return
    node, reborn = message.node, message.incarnation > record.identity.incarnation
    rebooted = bool(record.identity.boot_id and message.boot_id and message.boot_id != record.identity.boot_id)
    count_node(transition.state, node, -1)
    record.identity = _identify(message, transition.now, record.identity)
    transition.mark_node_changed(node)
    count_node(transition.state, node, 1)
    update_correlated_silence(transition)
    if reborn:
        transition.log_event("node.registered", f"the agent of {node} restarted (new incarnation)", node=node)
        transition.state.node_runtime[node].heartbeats = HeartbeatState(last_seen_at=transition.now)
        rejoin.expect_launchers(transition, node)
    _detect_repair(transition, record)
    _enter_current_window(transition, record)
    node_liveness.mark_seen(transition, node)
    if rebooted:
        rejoin.drop_launchers(transition, node, f"{node} was rebooted", include_rejoined=True)
    replace_agent_findings(transition, node, message.findings)


def _new_node(transition: Transition, message: Register) -> None:
    node = message.node
    record = NodeRecord(
        node=node,
        since=transition.now,
        sentence="registered",
        trace=transition.trace,
        identity=_identify(message, transition.now),
    )
    transition.state.nodes[node] = record
    transition.state.node_runtime[node] = NodeRuntime(heartbeats=HeartbeatState(last_seen_at=transition.now))
    transition.mark_node_changed(node)
    add_expected(transition.state, node)
    update_correlated_silence(transition)
    transition.log_event("node.registered", f"{node} joined the fleet", node=node)
    node_liveness.schedule_silence_deadline(transition, node)
    _enter_current_window(transition, record)
    for finding in message.findings:
        if not blocks_service(transition.state, record, finding, transition.now):
            continue
        if not record_sighting(transition, FindingReport(node=node, finding=finding)):
            sentence = f"{node} registered with an active finding and is quarantined until it clears: {finding.message}"
            action = Action.strongest(Action.DRAIN, finding.action)
            quarantine_before_service(transition, node, finding, sentence, action=action)
            break
    if (unfit := transition.state.fleet.unfit_nodes.pop(node, None)) is not None:
        transition.mark_fleet_changed()
        _carry_over_unfitness(transition, record, unfit)
    replace_agent_findings(transition, node, message.findings)


def _carry_over_unfitness(transition: Transition, record: NodeRecord, unfit: UnfitNode) -> None:
    """Quarantine a node whose name was forgotten while unfit: it must pass the earlier diagnostics."""
    sentence = f"{unfit.sentence}: it is quarantined until it passes its diagnostics"
    if record.state is not NodeState.QUARANTINED:
        begin_quarantine(transition, record.node, sentence, (), action=Action.DRAIN, offence_weight=0.0)
        transition.add_verdict(record.node, Decision.QUARANTINE, sentence, action=Action.DRAIN, evidence=())
    if (plan := record.quarantine.plan) is not None:
        plan.required_diagnostics = tuple(dict.fromkeys([*plan.required_diagnostics, *unfit.diagnostics]))
        plan.required_passes = max(plan.required_passes, unfit.required_passes)
    if unfit.defective_gpus and not _are_gpus_replaced(record, unfit.defective_gpus):
        record.quarantine.needs_operator, record.health.defective_gpus = True, list(unfit.defective_gpus)


def _are_gpus_replaced(record: NodeRecord, condemned: Collection[str]) -> bool:
    """Return whether none of these GPUs is left in the node; False if it reports no GPU."""
    uuids = {gpu.uuid for gpu in record.identity.gpus}
    return bool(uuids) and record.node not in condemned and not uuids & set(condemned)


def _identify(message: Register, now: float, before: NodeIdentity | None = None) -> NodeIdentity:
    return NodeIdentity(
        incarnation=message.incarnation,
        vault=message.vault,
        domain=message.domain,
        labels=dict(message.labels),
        gpus=message.gpus,
        host=message.host,
        adapters=message.adapters,
        gpu_modes=message.gpu_modes,
        agent_version=message.agent_version,
        takes_nvml_pause=message.takes_nvml_pause,
        driver_version=message.driver_version,
        boot_id=message.boot_id,
        booted_at=before.booted_at if before is not None and message.boot_id == before.boot_id else now,
        registered_at=now,
    )


def _enter_current_window(transition: Transition, record: NodeRecord) -> None:
    """Put a node that registers during a maintenance window into the window."""
    window = current_window(transition.state, record, transition.now)
    if window is not None and window.until > record.scheduling.maintenance_until:
        enter_maintenance(transition, record.node, window)


def _detect_repair(transition: Transition, record: NodeRecord) -> None:
    """End the need for an operator if the GPUs that computed wrongly have been replaced."""
    needed = record.quarantine.needs_operator and record.state is NodeState.QUARANTINED
    condemned = record.health.defective_gpus
    if not needed or not condemned or not _are_gpus_replaced(record, condemned):
        return
    record.quarantine.needs_operator, record.health.defective_gpus, record.audits.strikes = False, [], []
    offences.clear_offences(record)
    transition.clear_findings(record.node)
    sentence = f"{record.node} no longer contains the GPUs that computed wrongly"
    transition.log_event("node.repaired", sentence, node=record.node)
