"""Samples of memory modules, PCI Express links, RAID arrays and disks. Nothing here raises or blocks the poll."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep_agent.drivers import disks, error_counters
from everstep_agent.drivers.samples import DiskSample, HardwareSamples, RaidArraySample

DISKS_EVERY = 10
"""Polls between readings of arrays and disks."""
COUNTERS_EVERY = 30
"""Polls between readings of error counters: a node has some hundred of them."""
DEVICES_EVERY = 600
"""Polls between looks for new PCI devices."""
MAX_ABSENT = 64
"""Arrays and disks that are remembered after they have left, so that their findings clear."""


@dataclass
class HostHardwareSensor:
    """Read what changes seldom, and remember what was there."""

    _root: Path
    _polls: int = 0
    _devices: list[Path] = field(default_factory=list)
    _whole: set[str] = field(default_factory=set)
    _newest: HardwareSamples = field(default_factory=HardwareSamples)

    def poll(self) -> HardwareSamples:
        """Return the newest samples, with new ones at each tenth poll."""
        is_new = self._polls % DISKS_EVERY == 0
        if self._polls % DEVICES_EVERY == 0:
            self._devices = error_counters.watched_pci_devices(self._root)
        if self._polls % COUNTERS_EVERY == 0:
            self._newest = msgspec.structs.replace(
                self._newest,
                memory=tuple(error_counters.memory_modules(self._root)),
                pci=tuple(error_counters.pci_errors(self._devices)),
            )
        if is_new:
            self._newest = msgspec.structs.replace(self._newest, arrays=self._arrays(), disks=self._disks())
        self._polls += 1
        return msgspec.structs.replace(self._newest, is_new=is_new)

    def _arrays(self) -> tuple[RaidArraySample, ...]:
        arrays = disks.raid_arrays(self._root)
        is_first = self._polls == 0
        self._whole |= {array.name for array in arrays if is_first or not array.missing}
        here = [msgspec.structs.replace(array, was_whole=array.name in self._whole) for array in arrays]
        gone = {array.name for array in self._newest.arrays} - {array.name for array in here}
        self._whole -= gone
        return (*here, *(RaidArraySample(name=name) for name in sorted(gone)[:MAX_ABSENT]))

    def _disks(self) -> tuple[DiskSample, ...]:
        here = [*disks.nvme_controllers(self._root), *disks.scsi_disks(self._root)]
        gone = {disk.name for disk in self._newest.disks} - {disk.name for disk in here}
        return (*here, *(DiskSample(name=name) for name in sorted(gone)[:MAX_ABSENT]))
