"""NVML stays closed for a bounded time, unless a person's file says otherwise."""

from __future__ import annotations

from pathlib import Path

from everstep.clock import ManualClock
from everstep_agent.local.nvml_pause import NvmlPause


def test_hold_ends_by_itself_in_the_next_agent_too(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "nvml-pause"
    NvmlPause(path, clock).begin(60.0)
    later = NvmlPause(path, clock)
    clock.advance(59.0)
    later.expire()
    assert path.exists()
    clock.advance(1.0)
    later.expire()
    assert not path.exists()
    later.end()


def test_file_of_a_person_stays(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "nvml-pause"
    for content in ("", "until=tomorrow"):
        path.write_text(content)
        clock.advance(1e6)
        NvmlPause(path, clock).expire()
        assert path.exists()


def test_controller_orders_a_hold_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "nvml-pause"
    hold = NvmlPause(path, ManualClock())
    hold.order(900.0)
    assert path.exists()
    hold.order(0.0)
    assert not path.exists()
    NvmlPause(tmp_path / "absent" / "nvml-pause", ManualClock()).order(1.0)
