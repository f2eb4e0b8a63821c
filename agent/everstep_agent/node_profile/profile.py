"""Remember what a node has when it is well, and compare each poll with it. No clock and no files.

A value enters the profile when it has been steady for ``LEARN_S`` on a part without a fault. A part that later has less
makes a finding, from the first poll of the next run on. A loss stays one until a person accepts it. A mode or a limit
that stays changed for ``STEADY_S`` is learned, because an administrator has set it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from everstep.wire.v1.agent import Gpu
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import PortPresence, PortSample, Sample
from everstep_agent.sensors.sensor_messages import PollResult

logger = logging.getLogger(__name__)

PROFILE_VERSION = 1
"""Version of the stored form. A new value needs none, because values are stored by name."""

LEARN_S = 600.0
"""Seconds that a new or better value has to be steady before it is expected: links train for minutes after a boot."""

STEADY_S = 86_400.0
"""Seconds after which a changed mode or limit is expected."""

MAX_STEP_S = 60.0
"""Longest time between two polls that counts as steady: the sensors may have hung in between."""

TOLERANCE = 0.01
"""Relative difference below which two values are the same: the kernel's and the driver's reserves vary."""

MAX_SUBJECTS = 256
"""Parts remembered; those not seen for longest are forgotten first."""

MIN_PEERS = 3
"""GPUs of one model that tell which value is usual: of two, either may be the worse one."""

GPU, PORT, HOST = "gpu", "port", "host"
HOST_SUBJECT = "host"


class ProfileSample(Sample, frozen=True, kw_only=True):
    """What one part of the node lacks against its profile; 0 is well, None is unknown."""

    links_missing: float | None = None  # NVLinks
    pcie_generations_missing: float | None = None
    pcie_lanes_missing: float | None = None
    memory_missing: float | None = None  # fraction of a GPU's or the machine's memory
    power_limit_missing: float | None = None  # fraction of the power limit
    ecc_off: float | None = None  # 1 if a mode was on
    persistence_off: float | None = None
    mig_on: float | None = None  # 1 if the mode was off
    port_down: float | None = None  # 1 for a link that has not been up in this run
    port_missing: float | None = None  # 1 for a port whose device is not on the bus
    rate_missing: float | None = None  # fraction of the link's rate
    lanes_missing: float | None = None  # of an InfiniBand link
    gpus_missing: float | None = None  # on the PCI bus
    host_memory_missing: float | None = None  # fraction
    cpus_missing: float | None = None  # fraction
    new_uncorrected: float | None = None  # ECC errors between two runs of the agent
    new_remapped: float | None = None  # rows remapped for uncorrected errors between two runs of the agent
    new_link_downs: float | None = None  # link losses between two runs of the agent within one boot
    peer_links_missing: float | None = None  # against most GPUs of the model on this node
    peer_generations_missing: float | None = None
    peer_lanes_missing: float | None = None
    peer_memory_missing: float | None = None  # fraction


# The values of a profile


def _missing(before: float, now: float) -> float:
    return max(0.0, before - now)


def _missing_fraction(before: float, now: float) -> float:
    return max(0.0, 1.0 - now / before) if before > 0 else 0.0


def _turned_off(before: float, now: float) -> float:
    return float(before > 0 and now == 0)


def _turned_on(before: float, now: float) -> float:
    return float(before == 0 and now > 0)


NVLINKS_UP = "nvlinks_up"
"""The value of a GPU that its sample does not have by name, but by link."""


class ProfiledValue(NamedTuple):
    """One value that a profile holds. ``field`` is that of ``ProfileSample`` which receives the change."""

    name: str
    field: str
    change: Callable[[float, float], float]  # of the profile's value and the present one; 0 if it is no worse
    is_setting: bool = False  # whether an administrator may have changed it, so that it is learned in time
    peer_field: str = ""  # receives the change against most GPUs of the model


PROFILED: dict[str, tuple[ProfiledValue, ...]] = {
    GPU: (
        ProfiledValue(NVLINKS_UP, "links_missing", _missing, peer_field="peer_links_missing"),
        ProfiledValue(
            "pcie_generation_max", "pcie_generations_missing", _missing, peer_field="peer_generations_missing"
        ),
        ProfiledValue("pcie_width_max", "pcie_lanes_missing", _missing, peer_field="peer_lanes_missing"),
        ProfiledValue("memory_total_bytes", "memory_missing", _missing_fraction, peer_field="peer_memory_missing"),
        ProfiledValue("power_limit_w", "power_limit_missing", _missing_fraction, is_setting=True),
        ProfiledValue("ecc_mode", "ecc_off", _turned_off, is_setting=True),
        ProfiledValue("persistence_mode", "persistence_off", _turned_off, is_setting=True),
        ProfiledValue("mig_mode", "mig_on", _turned_on, is_setting=True),
    ),
    PORT: (
        ProfiledValue("up", "port_down", _missing),
        ProfiledValue("rate_gbps", "rate_missing", _missing_fraction),
        ProfiledValue("width", "lanes_missing", _missing),
    ),
    HOST: (
        ProfiledValue("gpus", "gpus_missing", _missing),
        ProfiledValue("memory_total_bytes", "host_memory_missing", _missing_fraction),
        ProfiledValue("cpus", "cpus_missing", _missing_fraction, is_setting=True),
    ),
}

COUNTS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    GPU: (
        ("ecc_uncorrected_lifetime", "new_uncorrected", False),
        ("remapped_uncorrected", "new_remapped", False),
    ),
    PORT: (("link_downs", "new_link_downs", True),),
    HOST: (),
}
"""Counters by kind of part: name, field for the growth between two runs, and whether a boot restarts the counter."""


# The stored form


class PendingValue(msgspec.Struct):
    """A value that differs from the profile's, and the seconds for which it has been steady."""

    value: float
    for_s: float = 0.0


class SubjectProfile(msgspec.Struct):
    """One part of the node: a GPU by its slot, a port by its name, or the host."""

    kind: str
    model: str = ""  # of a GPU; a GPU of another model is learned anew
    part: str = ""  # UUID of a GPU, hardware address of a port
    place: str = ""  # PCI address of a port
    values: dict[str, float] = {}
    pending: dict[str, PendingValue] = {}
    counts: dict[str, float] = {}
    seen_at: float = 0.0  # wall seconds


class SavedProfile(msgspec.Struct, kw_only=True):
    """A node's profile as it is stored."""

    version: int = PROFILE_VERSION
    serials: tuple[str, ...] = ()  # vendor, product and serial numbers of the machine, as far as they can be read
    boot_id: str = ""  # of the boot whose counters were stored
    subjects: dict[str, SubjectProfile] = {}


class _Observed(NamedTuple):
    """One part as a poll shows it."""

    kind: str
    values: dict[str, float | None]
    counts: dict[str, float | None]
    model: str = ""
    part: str = ""
    place: str = ""


class NodeProfile:
    """A node's profile. ``update`` compares and learns; the rest is for storing it and for accepting changes."""

    def __init__(
        self, saved: SavedProfile | None = None, accept_command: str = "everstep-agent profile accept"
    ) -> None:
        """``accept_command``: what a person runs to accept the state of a part, whose name follows."""
        self._saved = saved or SavedProfile()
        self.accept_command = accept_command
        self.has_changed = False
        """Whether anything worth storing has changed since the owner last reset this."""
        self._updated_at: float | None = None
        self._last_boot_id = self._saved.boot_id
        self._observed: dict[str, _Observed] = {}
        self._gone: list[str] = []
        self._counted: set[tuple[str, str]] = set()

    def export(self) -> SavedProfile:
        """Return the profile to store."""
        return self._saved

    def update(
        self, poll: PollResult, faulty: Collection[str], wall: float, monotonic: float
    ) -> dict[str, ProfileSample]:
        """Compare a poll with the profile, then learn from it.

        Args:
            poll: A full poll.
            faulty: Subjects with a fault, from which nothing is learned.
            wall: Wall seconds.
            monotonic: Monotonic seconds.

        Returns:
            A sample for each known or present part, by subject.
        """
        before, self._updated_at = self._updated_at, monotonic
        step_s = 0.0 if before is None else min(MAX_STEP_S, monotonic - before)
        self._observed = dict(_observe(poll))
        is_known = self._check_machine(poll)
        if is_known is None:
            return {}
        self._follow_moved_parts()
        self._gone, is_exchanged = self._gone_ports(poll)
        gone = list(self._gone)
        is_same_boot = bool(poll.boot_id) and poll.boot_id == self._last_boot_id
        peers = _usual_values(self._observed.values())
        samples = {}
        for subject, seen in self._observed.items():
            profile = self._profile_of(subject, seen)
            profile.seen_at = wall
            grown = self._count(subject, profile, seen, is_same_boot)
            if subject not in faulty:
                self._learn(profile, seen, step_s, gone)
            samples[subject] = ProfileSample(**_changes(profile, seen), **_peer_changes(seen, peers), **grown)
        self._saved.boot_id = poll.boot_id or self._saved.boot_id
        return samples | {subject: ProfileSample(port_missing=float(not is_exchanged)) for subject in gone}

    @property
    def has_compared(self) -> bool:
        """Whether a poll was compared, so that there is a state to accept."""
        return bool(self._observed)

    def accept(self, subjects: Collection[str] = ()) -> list[str]:
        """Expect the present state of parts from now on.

        Args:
            subjects: PCI addresses of GPUs, names of ports, or ``host``; none means all.

        Returns:
            The parts that are known.
        """
        known = [each for each in {**self._saved.subjects, **self._observed} if not subjects or each in subjects]
        for subject in known:
            seen = self._observed.get(subject)
            if seen is None:
                if subject in subjects or subject in self._gone:  # others may be hidden for the moment only
                    self._saved.subjects.pop(subject, None)
                continue
            profile = self._profile_of(subject, seen)
            profile.values |= {name: value for name, value in seen.values.items() if value is not None}
            profile.pending = {}
        self.has_changed = True
        return known

    # The machine

    def _check_machine(self, poll: PollResult) -> bool | None:
        """Start anew if the profile is of another machine, as after the disk was cloned. None: not known yet."""
        host = poll.host_identity
        serials = (host.vendor, host.product, host.serial, host.chassis_serial)
        has_serial = bool(host.serial or host.chassis_serial)
        is_same = self._is_same_machine(serials if has_serial else ())
        if is_same is False:
            logger.warning("the node profile is of another machine: the state of this one is learned anew")
            self._saved, self.has_changed = SavedProfile(), True
            self._counted = set()
        if has_serial and self._saved.serials != serials:
            self._saved.serials, self.has_changed = serials, True
        return is_same

    def _is_same_machine(self, serials: tuple[str, ...]) -> bool | None:
        """Compare the serial numbers, and the GPUs and ports: boards without numbers have the same placeholder."""
        saved = self._saved
        if not saved.subjects:
            return True
        if saved.serials and serials and saved.serials != serials:
            return False
        known = {profile.part for profile in saved.subjects.values() if profile.part}
        present = {seen.part for seen in self._observed.values() if seen.part}
        if known and present:
            return not known.isdisjoint(present)
        return True if (saved.serials and serials) or not known else None

    def _follow_moved_parts(self) -> None:
        """Give a part its profile under its new name: bus numbers change when a card is added."""
        subjects = self._saved.subjects
        for subject, seen in self._observed.items():
            if subject in subjects or not seen.part:
                continue
            identity = seen.kind, seen.part, _port_number(subject)
            for old, profile in subjects.items():
                is_same = (profile.kind, profile.part, _port_number(old)) == identity
                if is_same and old not in self._observed:
                    subjects[subject] = subjects.pop(old)
                    self.has_changed = True
                    break

    def _gone_ports(self, poll: PollResult) -> tuple[list[str], bool]:
        """Return known ports that have left the bus, and whether as many new ones stand in for them."""
        devices = poll.inventory.network_devices
        if devices is None:
            return [], False
        subjects = self._saved.subjects
        names = {port.name for port in poll.ports}
        gone = [
            subject
            for subject, profile in subjects.items()
            if profile.kind == PORT
            and profile.values.get("up")
            and subject not in names
            and profile.place
            and profile.place not in devices
        ]
        strangers = [
            subject
            for subject, seen in self._observed.items()
            if seen.kind == PORT and seen.values["up"] and (subject not in subjects or not subjects[subject].values)
        ]
        return gone, len(strangers) >= len(gone)

    def _profile_of(self, subject: str, seen: _Observed) -> SubjectProfile:
        """Return the part's profile; a new one for a new part or another model of GPU."""
        subjects = self._saved.subjects
        profile = subjects.get(subject)
        is_other = profile is not None and profile.model and seen.model and profile.model != seen.model
        if profile is None or is_other:
            self._make_room()
            profile = subjects[subject] = SubjectProfile(seen.kind)
            self.has_changed = True
        if seen.part and profile.part != seen.part:  # the same model with counters of its own
            profile.counts, profile.part, self.has_changed = {}, seen.part, True
        profile.model, profile.place = seen.model or profile.model, seen.place or profile.place
        return profile

    def _make_room(self) -> None:
        subjects = self._saved.subjects
        while len(subjects) >= MAX_SUBJECTS:
            del subjects[min(subjects, key=lambda subject: subjects[subject].seen_at)]

    # Learning

    def _learn(self, profile: SubjectProfile, seen: _Observed, step_s: float, gone: list[str]) -> None:
        for each in PROFILED[profile.kind]:
            now, before = seen.values.get(each.name), profile.values.get(each.name)
            if now is None:
                continue
            if before is not None and _is_same(before, now):
                self.has_changed |= profile.pending.pop(each.name, None) is not None
                continue
            pending = profile.pending.get(each.name)
            if pending is None or not _is_same(pending.value, now):
                pending = profile.pending[each.name] = PendingValue(now)
                self.has_changed = True
                continue
            pending.for_s += step_s
            is_worse = before is not None and each.change(before, now) > 0
            if is_worse and not each.is_setting:
                continue
            if pending.for_s >= (STEADY_S if is_worse else LEARN_S):
                if profile.kind == PORT and before is None and each.name == "up" and gone:
                    del self._saved.subjects[gone.pop()]
                profile.values[each.name] = now
                del profile.pending[each.name]
                self.has_changed = True

    def _count(self, subject: str, profile: SubjectProfile, seen: _Observed, is_same_boot: bool) -> dict[str, float]:
        """Note the counters. Returns how far each has grown since the last run, at its first value in this one."""
        grown = {}
        for name, field, restarts in COUNTS[seen.kind]:
            now, before = seen.counts.get(name), profile.counts.get(name)
            if now is None:
                continue
            is_comparable = (subject, name) not in self._counted and (is_same_boot or not restarts)
            self._counted.add((subject, name))
            grown[field] = max(0.0, now - before) if is_comparable and before is not None else 0.0
            if now != before:
                profile.counts[name] = now
                self.has_changed = True
        return grown


# Observation and comparison


def _observe(poll: PollResult) -> Iterator[tuple[str, _Observed]]:
    gpus = {gpu.pci_bus_id: gpu for gpu in poll.known_gpus}
    for gpu in poll.gpus:
        if ":" in gpu.pci_bus_id:  # others are named by their index, which is no place
            yield gpu.pci_bus_id, _observe_gpu(gpu, gpus.get(gpu.pci_bus_id))
    for port in poll.ports:
        if port.is_fabric and port.presence is PortPresence.HERE:
            yield port.name, _observe_port(port)
    values: dict[str, float | None] = {
        "gpus": poll.inventory.gpus,
        "cpus": poll.inventory.cpus,
        "memory_total_bytes": poll.host.memory_total_bytes,
    }
    yield HOST_SUBJECT, _Observed(HOST, values, {})


def _observe_gpu(sample: GpuSample, identity: Gpu | None) -> _Observed:
    up = [link.up for link in sample.nvlink.links]
    values = {each.name: _number(sample.value(each.name)) for each in PROFILED[GPU] if each.name != NVLINKS_UP}
    # A GPU that is divided into instances offers no NVLinks.
    is_divided = bool(values["mig_mode"])
    values[NVLINKS_UP] = None if is_divided or not up or None in up else float(sum(map(bool, up)))
    counts = {name: _number(sample.value(name)) for name, _, _ in COUNTS[GPU]}
    return _Observed(GPU, values, counts, "" if identity is None else identity.name, sample.uuid)


def _observe_port(port: PortSample) -> _Observed:
    """Return a port. One that is down by intent, waits for its network, or fell in this run is not judged."""
    is_down = port.is_enabled and not port.is_asleep and not port.has_signal and not port.was_up
    values = {
        "up": 1.0 if port.up else 0.0 if is_down else None,
        "rate_gbps": port.rate_gbps if port.up else None,
        "width": _number(port.width) if port.up else None,
    }
    identity = port.identity
    counts = {"link_downs": _number(port.link_downs)}
    return _Observed(PORT, values, counts, "", identity.get("address", ""), identity.get("pci_bus_id", ""))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _is_same(first: float, second: float) -> bool:
    return abs(first - second) <= TOLERANCE * max(abs(first), abs(second))


def _changes(profile: SubjectProfile, seen: _Observed) -> dict[str, float]:
    """Return what the part lacks against its profile, by field."""
    pairs = ((each, profile.values.get(each.name), seen.values.get(each.name)) for each in PROFILED[profile.kind])
    return {
        each.field: each.change(before, now) for each, before, now in pairs if before is not None and now is not None
    }


def _usual_values(observed: Iterable[_Observed]) -> dict[tuple[str, str], float]:
    """Return the value that more than half of a model's GPUs have, by model and name."""
    values: dict[tuple[str, str], list[float]] = {}
    for seen in observed:
        for name, value in seen.values.items() if seen.kind == GPU and seen.model else ():
            if value is not None:
                values.setdefault((seen.model, name), []).append(value)
    usual = {key: Counter(found).most_common(1)[0] for key, found in values.items() if len(found) >= MIN_PEERS}
    return {key: value for key, (value, count) in usual.items() if 2 * count > len(values[key])}


def _peer_changes(seen: _Observed, usual: dict[tuple[str, str], float]) -> dict[str, float]:
    found = {}
    for each in PROFILED[seen.kind]:
        most, now = usual.get((seen.model, each.name)), seen.values.get(each.name)
        if each.peer_field and most is not None and now is not None:
            found[each.peer_field] = each.change(most, now)
    return found


def _port_number(name: str) -> str:
    return name.partition("/")[2]


def describe(saved: SavedProfile) -> Iterator[str]:
    """Yield the lines of a profile for people."""
    for subject, profile in sorted(saved.subjects.items()):
        values = [f"{name} {_shown(value)}" for name, value in profile.values.items()]
        pending = [f"{name} now {_shown(each.value)}" for name, each in profile.pending.items()]
        yield "  ".join(filter(None, (subject, profile.model, ", ".join(chain(values, pending)))))


def _shown(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:g}"
