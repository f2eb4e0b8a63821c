from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.wire.v1.agent import GAUGE_INTERVAL_S, GpuGauges
from everstep_agent.uplink.gauge_pacing import DEAD_BANDS, GaugePacer, differ

BUSY = GpuGauges(
    index=0, temperature_c=60, power_w=600.0, utilization=0.9, memory_used_bytes=8 << 30, sm_clock_mhz=1755
)


def changed(**fields: Any) -> tuple[GpuGauges, ...]:
    return (msgspec.structs.replace(BUSY, **fields),)


def half() -> float:
    return 0.5


@pytest.fixture
def pacer() -> GaugePacer:
    """One that has sent BUSY at second 5."""
    pacer = GaugePacer()
    assert pacer.take_due(lambda: (BUSY,), 0.0, half) == ()
    assert pacer.take_due(lambda: (BUSY,), 5.0, half) == (BUSY,)
    return pacer


def test_first_gauges_wait_for_a_random_moment() -> None:
    pacer = GaugePacer()
    assert pacer.take_due(lambda: (BUSY,), 100.0, lambda: 0.99) == ()
    assert pacer.take_due(lambda: (BUSY,), 109.8, half) == ()
    assert pacer.take_due(lambda: (BUSY,), 109.9, half) == (BUSY,)


def test_changed_gauges_wait_for_the_interval(pacer: GaugePacer) -> None:
    hot = changed(temperature_c=90)
    assert pacer.take_due(lambda: hot, 5.0 + 1.5 * GAUGE_INTERVAL_S - 0.1, half) == ()
    assert pacer.take_due(lambda: hot, 5.0 + 1.5 * GAUGE_INTERVAL_S, half) == hot


@pytest.mark.parametrize("name", DEAD_BANDS)
def test_noise_is_no_change(name: str) -> None:
    value = getattr(BUSY, name) or 50
    before, band = changed(**{name: value}), DEAD_BANDS[name]
    assert not differ(before, changed(**{name: value + band / 2}))
    assert differ(before, changed(**{name: value + 2 * band}))
    assert differ(before, changed(**{name: None}))


@pytest.mark.parametrize("fields", [{"is_lost": True}, {"throttled_by": ("power_cap",)}, {"ecc_uncorrected": 1}])
def test_loss_throttling_and_errors_are_changes(fields: dict[str, Any]) -> None:
    assert differ((BUSY,), changed(**fields))
    assert differ((BUSY,), ())
