"""What is done to the run, one after another, each by the means by which it happens in a data centre."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
from pathlib import Path

from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.system_clock import SYSTEM_CLOCK
from examples.demo.stage import JOB, Stage, pause, seen_at
from examples.demo.story import FaultRecord, Run
from examples.demo.world import Node

LONGEST_STEP_PAUSE_S = 2.0
"""While the controller is away no step may take longer; ordinary steps take about 0.1 s on two busy cores."""
CONTROLLER_AWAY_S = 2.0
STILL_FOR_S, STILL_WITHIN_S = 0.2, 0.4
"""A hang holds all ranks after at most two more steps, and is found after half a second."""


def rank_killed(stage: Stage) -> None:
    """SIGKILL to one rank: the warm standby of its launcher takes its place."""
    node = stage.node_of(3)
    record = FaultRecord("rank_killed", f"SIGKILL to the rank on {node.name}", node.name)
    stage.begin(record)
    os.kill(stage.rank_of(node), signal.SIGKILL)
    stage.follow(record, {"rank.lost"}, node.name)


def rank_hangs(stage: Stage) -> None:
    """SIGSTOP to one rank: it is alive, silent, and all ranks wait for it."""
    node = stage.node_of(1)
    record = FaultRecord("rank_hangs", f"SIGSTOP to the rank on {node.name}", node.name)
    stage.begin(record)
    os.kill(stage.rank_of(node), signal.SIGSTOP)
    stage.follow(record, {"rank.hung"}, node.name)


def slot_rots(stage: Stage) -> None:
    """A bit flips in stored checkpoints while a hang holds the world still; the hash finds it, a copy replaces it."""
    holder, stuck = stage.node_of(0), stage.node_of(2)
    title = f"one bit flipped in every stored slot on {holder.name}, while the rank on {stuck.name} hangs"
    record = FaultRecord("slot_corrupt", title, holder.name)
    stage.begin(record)
    os.kill(stage.rank_of(stuck), signal.SIGSTOP)
    slots = stage.world.shared_memory / holder.name / JOB / "own-0"
    await_stillness(slots)
    flip_in_slots(slots)
    stage.follow(record, {"rank.hung"}, stuck.name)
    found = stage.expect(
        record.injected_at,
        f"{title}: found by its hash",
        lambda event: "vault.slot_corrupt" in event.sentence or "vault.slot_corrupt" in event.detail.get("key", ""),
    )
    # The generation answers the hang. What answers the bit is the copy that is fetched once the hash differs.
    record.found_at, record.decided_at, record.sentence = seen_at(found), found.at, found.sentence


def await_stillness(path: Path) -> None:
    """Returns when the rank has sealed what it still can: what is filled afterwards would be good again."""
    still_since, before = SYSTEM_CLOCK.monotonic(), sealed_versions(path)
    end = still_since + STILL_WITHIN_S
    while (now := SYSTEM_CLOCK.monotonic()) < end and now - still_since < STILL_FOR_S:
        pause(0.02)
        if (after := sealed_versions(path)) != before:
            still_since, before = now, after


def sealed_versions(path: Path) -> set[Version]:
    """What a segment file holds."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        return {header.version for _, header in SegmentView(view).sealed_slots()}


def flip_in_slots(path: Path) -> None:
    """Flips one bit in the middle of the payload of every sealed slot of a segment file."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as view:
        segment = SegmentView(view)
        for slot, _ in segment.sealed_slots():
            with segment.payload(slot) as payload:
                payload[len(payload) // 2] ^= 0x10


def node_killed(stage: Stage) -> None:
    """SIGKILL to everything a node runs: the spare takes its place, its share comes from the others' vaults."""
    node = stage.node_of(2)
    record = FaultRecord("node_killed", f"SIGKILL to all of {node.name}: agent, vault, launcher, rank", node.name)
    stage.begin(record)
    node.kill()
    stage.follow(record, {"node.lost", "node.disconnected", "launcher.left", "rank.lost", "generation"}, node.name)


def xid_79(stage: Stage) -> None:
    """XID 79 in the kernel log of a virtual GPU: the node is drained before it dies, and evicted."""
    node = stage.node_of(1)
    record = FaultRecord("xid_79", f"XID 79 in the kernel log of {node.name}", node.name, expected_eviction=node.name)
    stage.begin(record)
    with node.kernel_log.open("a") as log:
        log.write("NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n")
    stage.follow(record, {"finding", "verdict.evict"}, node.name)


def parameter_flips(stage: Stage) -> None:
    """One bit of one rank's parameters flips: the digests differ, the majority names the liar, the run rolls back."""
    node = stage.node_to_evict(3, 2, 1)
    title = f"one bit flipped in the parameters on {node.name}"
    record = FaultRecord("parameter_corrupt", title, node.name, expected_eviction=node.name)
    stage.begin(record)
    os.kill(stage.rank_of(node), signal.SIGUSR1)
    stage.follow(record, {"verdict.evict"}, node.name)


def controller_killed(stage: Stage) -> None:
    """SIGKILL to the controller in the middle of training: no step waits; after its restart nothing is forgotten."""
    world = stage.world
    assert world.controller is not None
    assert stage.watch.job is not None
    before = stage.watch.job.summary
    record = FaultRecord("controller_killed", "SIGKILL to the controller", "controller")
    stage.begin(record)
    world.controller.kill()
    world.controller.wait()
    record.found_at = SYSTEM_CLOCK.wall()
    pause(CONTROLLER_AWAY_S)
    restarted_at = SYSTEM_CLOCK.wall()
    world.start_controller()
    record.decided_at = SYSTEM_CLOCK.wall()
    stage.say("restored", f"the controller is back, {record.decided_at - restarted_at:.2f} s after its restart")
    stage.finish(record)
    run = Run.read(world.steps)
    around = [step.at for step in run.finished if record.injected_at - 1 < step.at < record.decided_at + 1]
    longest = max((later - earlier for earlier, later in itertools.pairwise(around)), default=0.0)
    record.sentence = f"away {record.decided_at - record.injected_at:.1f} s; the longest step took {longest:.2f} s"
    if longest > max(LONGEST_STEP_PAUSE_S, (record.decided_at - record.injected_at) / 2):  # a slow machine is as slow
        record.problem = f"a step waited {longest:.2f} s for the controller"
    stage.watch.wait(
        lambda: stage.watch.job is not None and stage.watch.job.summary.step > before.step, "its job is known"
    )
    if stage.watch.job is None or stage.watch.job.summary.generation != before.generation:
        record.problem = f"generation {before.generation} was not the same after the restart"


def comes_back_and_grows(stage: Stage, *nodes: Node) -> None:
    """Lost nodes are repaired, probed and readmitted; the job grows at a checkpoint boundary."""
    for node in nodes:
        stage.comes_back(node)
    for node in nodes:
        stage.readmitted(node)
        stage.say("restored", f"{node.name} passed its probe and is healthy again")
