"""Compare each GPU with the node's other GPUs of its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from everstep_agent.drivers.gpu_samples import GpuPeerComparison, GpuSample

MIN_OTHERS = 3
"""Other GPUs that tell which value is usual: of fewer, any may be the odd one."""

LOADED_UTILIZATION = 0.9
"""Utilization from which on the clocks of GPUs are compared. One GPU below it means that their loads differ."""

POWER_HEADROOM = 0.9
"""Share of its power limit from which on a GPU is taken for one that its power cap slows down. NVML's reason for that
comes and goes ten times a second, and the power is an average."""

CLOCKS_SET = 0x2
"""NVML clock event reason: a person or a program has set the clocks."""

CLOCKS_LIMITED = 0x1 | 0x4 | 0x8 | 0x10 | 0x20 | 0x40 | 0x80 | 0x100
"""NVML clock event reasons that explain a low clock: idle, power cap, hardware slowdown, sync boost, heat, power brake,
display."""

MANY_TIMES = 10
"""How many times the others' corrected errors a GPU must have for its errors to be its own (judgement)."""


def compare_gpus(samples: Iterable[GpuSample], models: Mapping[str, str]) -> dict[str, GpuPeerComparison]:
    """Return the comparison of each GPU that has enough others of its model, by PCI address.

    Args:
        samples: The GPUs of one poll.
        models: Names of the GPUs' models, by UUID.
    """
    groups: dict[str, list[GpuSample]] = {}
    for sample in samples:
        if not sample.error and (model := models.get(sample.uuid)):
            groups.setdefault(model, []).append(sample)
    return {
        gpu.pci_bus_id: _compare(gpu, [other for other in group if other is not gpu])
        for group in groups.values()
        if len(group) > MIN_OTHERS
        for gpu in group
    }


def _compare(gpu: GpuSample, others: Sequence[GpuSample]) -> GpuPeerComparison:
    clock = _clock_fraction(gpu, others)
    is_set = bool((gpu.clocks.throttle_reasons or 0) & CLOCKS_SET)
    usual_limit_w = _median(other.power.power_limit_w for other in others)
    unknown = usual_limit_w is None or gpu.power.power_limit_w is None
    errors, errors_of_others = gpu.memory_errors, [other.memory_errors for other in others]
    return GpuPeerComparison(
        clock_fraction=None if is_set else clock,
        set_clock_fraction=clock if is_set else None,
        power_limit_gap_w=None if unknown else (usual_limit_w or 0.0) - (gpu.power.power_limit_w or 0.0),
        ecc_off=_ecc_off(gpu, others),
        dram_corrected=_if_many(errors.ecc_dram_corrected, [each.ecc_dram_corrected for each in errors_of_others]),
        sram_corrected=_if_many(errors.ecc_sram_corrected, [each.ecc_sram_corrected for each in errors_of_others]),
    )


def _clock_fraction(gpu: GpuSample, others: Sequence[GpuSample]) -> float | None:
    """Return the SM clock as a fraction of the others' median, while all are under load and nothing explains it."""
    reasons, power_w, limit_w = gpu.clocks.throttle_reasons, gpu.power.power_w, gpu.power.power_limit_w
    if reasons is None or reasons & CLOCKS_LIMITED or power_w is None or limit_w is None:
        return None
    if power_w >= POWER_HEADROOM * limit_w or gpu.clocks.sm_clock_mhz is None:
        return None
    if any((each.utilization.gpu_utilization or 0.0) < LOADED_UTILIZATION for each in (gpu, *others)):
        return None
    usual_mhz = _median(other.clocks.sm_clock_mhz for other in others)
    return gpu.clocks.sm_clock_mhz / usual_mhz if usual_mhz else None


def _ecc_off(gpu: GpuSample, others: Sequence[GpuSample]) -> int | None:
    """Return 1 if the GPU's ECC is off and most others' is on."""
    modes = [mode for other in others if (mode := other.modes.ecc_mode) is not None]
    if gpu.modes.ecc_mode is None or len(modes) < MIN_OTHERS:
        return None
    return int(not gpu.modes.ecc_mode and 2 * sum(modes) > len(modes))


def _if_many(count: int | None, others: Sequence[int | None]) -> int | None:
    """Return the count if it is many times the others', so that its growth is the GPU's own."""
    usual = _median(others)
    return count if count is not None and usual is not None and count >= MANY_TIMES * usual else None


def _median(values: Iterable[float | None]) -> float | None:
    """Return the (lower) median of the known values, or None if there are too few."""
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if len(known) >= MIN_OTHERS else None
