"""The simulated month of bench.sensors: which polls it may leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sensors import noise
from bench.sensors.events import EventRow
from bench.sensors.noise import Recording, SimulatedNode, Totals
from everstep.vocabulary import Severity
from everstep_agent.policy.rules import load_policy

HEAT = EventRow(name="heat", description="", fault=False, change={"gpus": {"4": {"temperature_c": 86}}}, for_s=4)
HASTY = """
[[rule]]
id = "gpu-too-hot"
kind = "gpu.temperature"
metric = "gpu.temperature_margin_c"
criterion = "at_most"
threshold = 2
n_of_m = [3, 8]
severity = "warning"
message = "{subject}"
clear_after_s = 60.0
source = "a rule that accuses a healthy node"
"""


@pytest.fixture(scope="module")
def recording() -> Recording:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "AFTERMATH_POLLS", 3)
        patch.setattr(noise, "BOOT_S", 5)
        return noise.record([HEAT], load_policy())


def live(node: SimulatedNode) -> None:
    for _ in range(3):
        node.play_row(HEAT)
        node.start_or_end_job()
        node.boot()


def test_month_skips_polls_and_misses_no_finding(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "hasty.toml"
    site.write_text(HASTY)
    policy = load_policy([site])
    skipping, complete = Totals(), Totals()
    live(SimulatedNode("n1", recording, policy, skipping, "seed"))
    monkeypatch.setattr(SimulatedNode, "_is_stirred", lambda node: True)
    live(SimulatedNode("n1", recording, policy, complete, "seed"))
    assert skipping.found[Severity.WARNING] == complete.found[Severity.WARNING] == 3
    assert skipping.polls < complete.polls / 2


def test_month_has_no_finding_by_the_built_in_rules(recording: Recording) -> None:
    totals = Totals()
    live(SimulatedNode("n1", recording, load_policy(), totals, "seed"))
    assert (dict(totals.above_info), totals.evictions) == ({}, 0)
