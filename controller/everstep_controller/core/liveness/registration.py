"""An agent introduces itself: a new node, a new life of a known one, or the same life once more."""

from __future__ import annotations

from collections.abc import Collection

from everstep.errors import NotFound, StaleGeneration
from everstep.vocabulary import Action, Decision, NodeState
from everstep.wire.v1.agent import Register
from everstep_controller.core.health import evidence
from everstep_controller.core.health.eviction import spared
from everstep_controller.core.health.evidence import clear_own
from everstep_controller.core.health.findings import take_picture
from everstep_controller.core.health.maintenance import enter_maintenance, window_of
from everstep_controller.core.health.outbreaks import convicts
from everstep_controller.core.health.quarantine import begin_quarantine, refuse
from everstep_controller.core.liveness.correlation import count, expect, mind
from everstep_controller.core.liveness.node_liveness import drop_launchers, expect_launchers, heard, watch
from everstep_controller.core.records import NodeRecord, Unfit
from everstep_controller.core.state import FleetState, NodeLive, Pulse
from everstep_controller.core.transition import Turn


def check_life(state: FleetState, node: str, incarnation: int) -> None:
    """Raises NotFound for a node that never registered, StaleGeneration for another life of it than the current."""
    record = state.nodes.get(node)
    if record is None:
        raise NotFound(f"node {node} is not registered here: register first")
    if incarnation != record.incarnation:
        raise StaleGeneration(
            f"incarnation {incarnation} of {node} is not the registered one ({record.incarnation}): register first"
        )


def check_register(state: FleetState, register: Register) -> None:
    """Raises StaleGeneration when a later life of the node has registered."""
    record = state.nodes.get(register.node)
    if record is not None and register.incarnation < record.incarnation:
        raise StaleGeneration(
            f"{register.node} has registered with a later incarnation ({record.incarnation} > {register.incarnation}): "
            "two agents run under one name, or this one should have ended"
        )


def register(turn: Turn, words: Register) -> None:
    """Takes the node into the fleet, or back."""
    record = turn.state.nodes.get(words.node)
    if record is None:
        _new_node(turn, words)
        return
    node, reborn = words.node, words.incarnation > record.incarnation
    rebooted = bool(record.boot_id and words.boot_id and words.boot_id != record.boot_id)
    count(turn.state, node, -1)
    _note(turn, record, words)
    count(turn.state, node, 1)
    mind(turn)
    if reborn:
        turn.audit("node.registered", f"the agent of {node} began a new life", node=node)
        turn.state.live_nodes[node].pulse = Pulse(heard_at=turn.now)
        expect_launchers(turn, node)
    _note_repair(turn, record)
    _note_maintenance(turn, record)
    heard(turn, node)
    if rebooted:
        drop_launchers(turn, node, f"{node} was rebooted", confirmed=True)
    take_picture(turn, node, words.findings)


def _new_node(turn: Turn, words: Register) -> None:
    node = words.node
    record = NodeRecord(
        node=node, incarnation=words.incarnation, vault=words.vault, since=turn.now, sentence="registered"
    )
    record.trace = turn.trace
    turn.state.nodes[node] = record
    turn.state.live_nodes[node] = NodeLive(pulse=Pulse(heard_at=turn.now))
    _note(turn, record, words)
    expect(turn.state, node)
    mind(turn)
    turn.audit("node.registered", f"{node} joined the fleet", node=node)
    watch(turn, node)
    _note_maintenance(turn, record)
    for sick in words.findings:
        if not convicts(turn.state, record, sick, turn.now):
            continue
        if not spared(turn, turn.policy.rules.rule(sick), node, sick):
            sentence = f"{node} came with {sick.message}: it must get well before it serves"
            refuse(turn, node, sick, sentence, action=Action.strongest(Action.DRAIN, sick.action))
            break
    if (unfit := turn.state.fleet.unfit.pop(node, None)) is not None:
        turn.fleet_changed()
        _come_back(turn, record, unfit)
    take_picture(turn, node, words.findings)


def _come_back(turn: Turn, record: NodeRecord, unfit: Unfit) -> None:
    """A name that was forgotten while its node was not fit to serve: it has to pass what that node had to. GPUs that
    computed wrongly are as they were: they need somebody's word, or to be replaced."""
    sentence = f"{unfit.sentence}: it must pass its diagnostics before it serves"
    if record.state is not NodeState.QUARANTINED:
        begin_quarantine(turn, record.node, sentence, (), action=Action.DRAIN, offence=0.0)
        turn.verdict(record.node, Decision.QUARANTINE, sentence, action=Action.DRAIN, evidence=())
    if record.course is not None:
        record.course.checks = tuple(dict.fromkeys([*record.course.checks, *unfit.checks]))
        record.course.passes = max(record.course.passes, unfit.passes)
    if unfit.condemned and not _replaced(record, unfit.condemned):
        record.needs_operator, record.condemned = True, list(unfit.condemned)


def _replaced(record: NodeRecord, condemned: Collection[str]) -> bool:
    """Whether none of these GPUs is left in the node; of one that shows none nobody can tell."""
    uuids = {gpu.uuid for gpu in record.gpus}
    return bool(uuids) and record.node not in condemned and not uuids & set(condemned)


def _note(turn: Turn, record: NodeRecord, words: Register) -> None:
    if not record.booted_at or words.boot_id != record.boot_id:
        record.booted_at = turn.now
    record.incarnation, record.vault, record.domain = words.incarnation, words.vault, words.domain
    record.gpus, record.host, record.labels = words.gpus, words.host, dict(words.labels)
    record.agent_version = words.agent_version
    record.driver_version, record.boot_id = words.driver_version, words.boot_id
    record.registered_at = turn.now
    turn.node_changed(record.node)


def _note_maintenance(turn: Turn, record: NodeRecord) -> None:
    """A node that comes up in a window is in it."""
    window = window_of(turn.state, record, turn.now)
    if window is not None and window.until > record.maintenance_until:
        enter_maintenance(turn, record.node, window)


def _note_repair(turn: Turn, record: NodeRecord) -> None:
    """GPUs that computed wrongly have been replaced: the node needs nobody's word any more."""
    if not record.needs_operator or record.state is not NodeState.QUARANTINED or not record.condemned:
        return
    if not _replaced(record, record.condemned):
        return
    record.needs_operator, record.condemned = False, []
    evidence.absolve(record)
    clear_own(turn, record.node)
    turn.audit("node.repaired", f"{record.node} has other GPUs than those that computed wrongly", node=record.node)
