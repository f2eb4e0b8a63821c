"""The trials of the load bench. Each function runs one trial, and returns the rows of its table."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

from bench.load import failure_mix
from bench.load.events import Follower
from bench.load.fleet import POLL_S, Controller, Fleet
from bench.load.statistics import Distribution
from bench.table import Row, marks

MIB = 1 << 20
LOSSES_OF_A_NODE = 3
"""Ranks that a node may lose within minutes. Its job leaves out a node that loses more."""
CPU_PER_BEAT = "controller CPU per heartbeat"
FULL_NODES, FULL_INTERVAL_S = 12_500, 1.0
"""The fleet of 100,000 GPUs, and the heartbeat interval, for which the figures are judged."""


def begin(fleet: Fleet, interval_s: float, **chaos: float) -> None:
    """Start the heartbeats, and let one interval pass as a warm-up."""
    fleet.all("beat", interval_s=interval_s, **chaos)
    time.sleep(max(2.0, 1.2 * interval_s))
    fleet.sample()


# --- load --------------------------------------------------------------------------------------------------------


def steady(fleet: Fleet, seconds: float, interval_s: float) -> list[Row]:
    """Measure heartbeats of all nodes without any other event."""
    controller = fleet.controller
    writes = controller.metric("everstep_controller_commit_seconds_count")
    window = _Window(fleet)
    time.sleep(seconds)
    took_s, cpu_s, beats, sample = window.end()
    writes = controller.metric("everstep_controller_commit_seconds_count") - writes
    judged = (fleet.nodes, interval_s) == (FULL_NODES, FULL_INTERVAL_S)
    large = interval_s <= 1.0 and fleet.nodes >= 5000  # other work of a controller has little weight in such fleets
    each = f"{fleet.nodes} nodes every {interval_s:g} s"
    late = f"the agents' own lateness: {_ms(sample['lateness'], 0.99):.1f} ms at the 99th percentile"
    return [
        Row(f"controller CPU, {each}", cpu_s / took_s, "cores", *marks(judged, 0.6, 0.3)),
        Row(CPU_PER_BEAT, cpu_s / max(1, beats) * 1e6, "us", *marks(large, 48.0, 24.0)),
        Row("ingest latency, median", _ms(sample["beats"], 0.5), "ms"),
        Row("ingest latency, 99th percentile", _ms(sample["beats"], 0.99), "ms", *marks(judged, 50.0, 20.0), late),
        Row("ingest latency, largest", sample["beats"].largest * 1e3, "ms"),
        Row("resident memory", controller.resident_bytes() / MIB, "MiB", *marks(judged, 600.0, 300.0)),
        Row("transactions meanwhile", writes, "", against="beats that change nothing cost none"),
    ]


def forming(fleet: Fleet, seconds: float, quiet_us: float) -> list[Row]:
    """Measure heartbeats of all nodes while one job after the other ends and forms again.

    Args:
        quiet_us: The controller's CPU per heartbeat without other events, which is subtracted.
    """
    fleet.sample()
    window, took = _Window(fleet), list[float]()
    while not took or time.perf_counter() < window.started + seconds:
        took.append(fleet.form_again(f"job-{len(took) % fleet.jobs:03d}"))
    took_s, cpu_s, beats, sample = window.end()
    each_ms = (cpu_s - beats * quiet_us / 1e6) / (len(took) * fleet.nodes_of_a_job) * 1e3
    formed = f"{len(took)} jobs of {fleet.nodes_of_a_job} nodes in {took_s:.0f} s, one after the other"
    late = f"the agents' own lateness: {_ms(sample['lateness'], 0.99):.1f} ms at the 99th percentile"
    when = "while jobs form"
    return [
        Row(f"controller CPU {when}", cpu_s / took_s, "cores", against=formed),
        Row(f"controller CPU per heartbeat {when}", cpu_s / max(1, beats) * 1e6, "us"),
        Row(f"ingest latency {when}, median", _ms(sample["beats"], 0.5), "ms"),
        Row(f"ingest latency {when}, 99th percentile", _ms(sample["beats"], 0.99), "ms", against=late),
        Row(f"ingest latency {when}, largest", sample["beats"].largest * 1e3, "ms"),
        Row("controller CPU per node that forms, beside its beats", each_ms, "ms"),
        Row("offers of a job, to the step of its last rank, median", statistics.median(took), "s"),
    ]


class _Window:
    """Counters of a controller and its fleet since the object was made."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._beats, self._cpu_s = fleet.status()["sent"], fleet.controller.cpu_s()
        self.started = time.perf_counter()

    def end(self) -> tuple[float, float, int, dict[str, Distribution]]:
        """Return elapsed seconds, CPU seconds of the controller, sent heartbeats, and the agents' measurements."""
        took_s = time.perf_counter() - self.started
        cpu_s, beats = self._fleet.controller.cpu_s() - self._cpu_s, self._fleet.status()["sent"] - self._beats
        return took_s, cpu_s, beats, self._fleet.sample()


def _ms(distribution: Distribution, share: float) -> float:
    return distribution.quantile(share) * 1e3


JUDGEMENTS = ("correlated", "evict", "defer_eviction")
"""Possible verdicts on many nodes that fail at once."""


# --- failures ----------------------------------------------------------------------------------------------------


def one_failure(fleet: Fleet, rounds: int) -> list[Row]:
    """Measure losses of a rank until every node of its job has the next generation."""
    rounds = min(rounds, LOSSES_OF_A_NODE * fleet.nodes)
    took = [_lose_a_rank(fleet, f"job-{number % fleet.jobs:03d}") for number in range(rounds)]
    name = f"rank lost, to the push at all {fleet.nodes_of_a_job} nodes of its job"
    return [
        Row(f"{name}, median of {rounds}", statistics.median(took) * 1e3, "ms", 250.0, 100.0),
        Row(f"{name}, slowest", max(took) * 1e3, "ms"),
    ]


def _lose_a_rank(fleet: Fleet, job: str) -> float:
    """Return the seconds from the report to the last push."""
    lost = _lost_rank(fleet, job)
    last = fleet.until_entered(job, int(lost["generation"]) + 1)
    fleet.until("resuming", lambda status: status["unreported"] == 0, 60)
    time.sleep(0.5)  # lets all effects of the failure pass before the next one
    return last - float(lost["at"])


def _lost_rank(fleet: Fleet, job: str) -> dict[str, Any]:
    """Let a node of the job report the loss of a rank, and return the time and the generation."""
    lost: dict[str, Any] = next(a for crowd in fleet.crowds if (a := crowd.tell({"do": "lose_rank", "job": job})))
    return lost


def failover(fleet: Fleet, standby: Controller) -> list[Row]:
    """Kill the leader together with a rank, and measure until the next leader has answered all agents."""
    killed_at = fleet.controller.kill()
    lost = _lost_rank(fleet, "job-000")
    fleet.controller = standby
    answered = _home(fleet)
    pushed = fleet.until_entered("job-000", int(lost["generation"]) + 1)
    fleet.until("resuming", lambda status: status["unreported"] == 0, 60)
    wrong = [
        event
        for kind in ("node.suspect", "node.lost", "verdict.evict", "job.paused")
        for event in standby.client.events(kind=kind)
    ]
    name = "leader killed, to an answer of the next one"
    against = f"{len(answered)} sessions on this machine's two cores, {len(fleet.crowds)} processes of agents"
    return [
        Row(f"{name}, first agent", answered[0] - killed_at, "s"),
        Row(f"{name}, half of {len(answered)}", answered[len(answered) // 2] - killed_at, "s", 3.0, 1.0, against),
        Row(f"{name}, all", answered[-1] - killed_at, "s", against="a beat each, with what it has found"),
        Row(
            f"rank lost then, to the push at all {fleet.nodes_of_a_job} nodes of its job", pushed - killed_at, "s", 3.0
        ),
        Row("nodes suspected, lost or evicted, jobs paused meanwhile", float(len(wrong)), "", 0.0, 0.0),
    ]


def _home(fleet: Fleet) -> list[float]:
    """Return the wall times at which the new leader answered the agents."""
    end = time.perf_counter() + 120
    while len(answered := sorted(at for times in fleet.all("home") for at in times)) < fleet.nodes:
        if time.perf_counter() > end:
            raise SystemExit(f"{len(answered)} of {fleet.nodes} answered\n{fleet.controller.log()}")
        time.sleep(POLL_S)
    return answered


def mass_failure(fleet: Fleet, follower: Follower, count: int) -> list[Row]:
    """Let many nodes report faults of many kinds at once, and measure until each has a verdict.

    A few nodes are evicted within the budget, and the breaker defers the next evictions. No node is evicted for a fault
    that too many nodes have.
    """
    since = len(follower.seen)
    kinds = failure_mix.mixed(count)
    failed_at = fleet.fail(kinds)
    end = time.perf_counter() + 120
    while len(decided := follower.first_verdicts(set(failed_at), since)) < len(failed_at):
        if time.perf_counter() > end:
            break
        time.sleep(POLL_S)
    took = sorted(event.at - failed_at[node] for node, event in decided.items())
    verdicts = Counter(event.kind.removeprefix("verdict.") for event in decided.values())
    against = f"{len(set(kinds))} different faults"
    name = f"{len(failed_at)} of {fleet.nodes} nodes failing at once"
    ninety = took[int(0.9 * len(failed_at)) - 1] if len(took) >= 0.9 * len(failed_at) else None
    found = sorted({*JUDGEMENTS, *verdicts})
    return [
        Row(f"{name}: decided, 90th percentile", ninety, "s", 2.0, 1.0, "NVSentinel: 419 s"),
        Row(f"{name}: decided, all", took[-1] if len(took) == len(failed_at) else None, "s", against=against),
        *(Row(f"{name}: first verdict {kind}", float(verdicts[kind]), "nodes") for kind in found),
    ]


# --- storms ------------------------------------------------------------------------------------------------------


def storm(fleet: Fleet, nodes: int, per_s: float, seconds: float, calm: Distribution) -> list[Row]:
    """Let some nodes report XIDs continuously, and measure lost reports and the latencies of all other nodes."""
    before = fleet.controller.metric("everstep_controller_reports_total")
    fleet.sample()
    fleet.crowds[-1].tell({"do": "storm", "nodes": nodes, "per_s": per_s, "seconds": seconds})
    time.sleep(seconds)
    storming, others = fleet.sample_apart()
    rest = _until_calm(fleet)
    taken = fleet.controller.metric("everstep_controller_reports_total") - before
    name = f"{nodes} node{'s' if nodes > 1 else ''} at {per_s:g} XIDs/s"
    ratio = others["beats"].quantile(0.99) / max(1e-9, calm.quantile(0.99))
    against = (
        f"{_ms(others['beats'], 0.99):.1f} ms at the 99th percentile, agents late {_ms(others['lateness'], 0.99):.1f}, "
        f"unloaded {_ms(calm, 0.99):.1f} ms"
    )
    return [
        Row(f"{name}: lost of {rest['made']}", rest["made"] - taken, "reports", 0.0, 0.0),
        Row(f"{name}: others' latency against unloaded", ratio, "x", 2.0, 1.1, against),
        Row(f"{name}: report to its acknowledgement, 99th percentile", _ms(storming["reports"], 0.99), "ms"),
    ]


def _until_calm(fleet: Fleet) -> dict[str, int]:
    """Wait until all reports of the storms are acknowledged, and return their counts."""
    end = time.perf_counter() + 30
    while (rest := fleet.crowds[-1].tell({"do": "calm"}))["open"] and time.perf_counter() < end:
        time.sleep(POLL_S)
    counts: dict[str, int] = rest
    return counts


def calm(fleet: Fleet, seconds: float) -> Distribution:
    """Return the latencies of heartbeats without any other event."""
    fleet.sample()
    time.sleep(seconds)
    return fleet.sample_apart()[1]["beats"]


def false_evictions(
    fleet: Fleet, follower: Follower, seconds: float, interval_s: float, chaos: dict[str, Any]
) -> list[Row]:
    """Count false losses and evictions under lost and late heartbeats and a pause of the controller."""
    fleet.all("beat", interval_s=interval_s, loss=chaos["loss"], jitter_s=chaos["jitter_s"])
    since, started = len(follower.seen), time.perf_counter()
    time.sleep(seconds / 2)
    if chaos["pause_s"]:
        fleet.controller.pause(chaos["pause_s"])
    time.sleep(max(0.0, started + seconds - time.perf_counter()))
    kinds = follower.kinds(since)
    wrong = sum(kinds[kind] for kind in ("verdict.evict", "node.lost", "job.paused"))
    against = (
        f"{chaos['loss']:.0%} of beats lost, {chaos['jitter_s'] * 1e3:g} ms jitter, a pause of {chaos['pause_s']:g} s "
        f"in {seconds:g} s; suspected for a moment: {kinds['node.suspect']}"
    )
    return [Row(f"false evictions and losses among {fleet.nodes} nodes", float(wrong), "nodes", 0.0, 0.0, against)]


def lateness(fleet: Fleet, follower: Follower, seconds: float, interval_s: float) -> list[Row]:
    """Measure a fleet with more nodes than connections: nodes that close their sessions, and suspected nodes."""
    kinds, status = follower.kinds(), fleet.status()
    wrong = float(kinds["node.suspect"] + kinds["node.lost"])
    held = f"{status['connected']} sessions held, {status['phases']['hung up']} hung up between beats"
    return [
        Row(f"nodes that seemed late in {seconds:g} s", wrong, "nodes", 0.0, 0.0, held),
        *_giant_memory(fleet),
        *idle_failure(fleet, follower),
    ]


def _giant_memory(fleet: Fleet) -> list[Row]:
    gib = fleet.controller.resident_bytes() / (1 << 30)
    return [Row(f"resident memory with {fleet.nodes} nodes", gib, "GiB", 3.0, 3.0)]


def idle_failure(fleet: Fleet, follower: Follower) -> list[Row]:
    """Measure one failure until its verdict, in a fleet that closes sessions between heartbeats."""
    since = len(follower.seen)
    failed_at: dict[str, float] = fleet.crowds[-1].tell({"do": "fail", "kinds": [failure_mix.FALLEN_OFF_THE_BUS]})
    end = time.perf_counter() + 60
    while not (decided := follower.first_verdicts(set(failed_at), since)) and time.perf_counter() < end:
        time.sleep(POLL_S)
    took = next((event.at - failed_at[node] for node, event in decided.items()), None)
    return [Row(f"one failure among {fleet.nodes} nodes: decided", took, "s", 2.0, 1.0)]
