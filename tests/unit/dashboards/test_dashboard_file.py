"""The checked-in dashboard and rules, without servers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dashboards.build import GRID, TARGET, dashboard, queries
from tools.docs_site import metrics

PROMETHEUS = TARGET.parents[1] / "prometheus"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian's package prometheus has it): the rules were not tested",
)


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def test_checked_in_dashboard_is_current() -> None:
    assert json.loads(TARGET.read_text()) == dashboard(), "run `python -m dashboards.build`"


def test_panels_have_unique_ids_titles_and_queries() -> None:
    found = list(panels())
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    for panel in found:
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]


def test_panels_stay_on_the_grid_without_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_has_summary_and_description() -> None:
    rules = yaml.safe_load((PROMETHEUS / "everstep.rules.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]
        assert alert["labels"]["severity"] in {"page", "warn"}


def test_queried_controller_series_exist() -> None:
    rules = yaml.safe_load((PROMETHEUS / "everstep.rules.yml").read_text())["groups"][0]["rules"]
    asked = " ".join([*queries(), *(rule["expr"] for rule in rules)])
    recorded = {rule["record"] for rule in rules if "record" in rule}
    exported = set(re.findall(r"`(everstep_controller_\w+)`", metrics.page()))
    assert {re.sub("_bucket$", "", name) for name in re.findall(r"everstep_controller_\w+", asked)} <= exported
    assert set(re.findall(r"everstep:[\w:]+", asked)) <= recorded


@promtool
def test_promtool_accepts_the_rules() -> None:
    command = ["promtool", "check", "rules", str(PROMETHEUS / "everstep.rules.yml")]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


@pytest.mark.slow
@promtool
def test_alerts_pass_the_promtool_tests() -> None:
    command = ["promtool", "test", "rules", str(PROMETHEUS / "everstep.test.yml")]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
