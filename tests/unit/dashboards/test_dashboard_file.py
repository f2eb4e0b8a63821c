"""The checked-in dashboards and rules, without servers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.build import DASHBOARDS, FOLDER, GRID, build, queries, text
from dashboards.panels import Dashboard
from tests.support.documents.markdown import anchors
from tools.docs_site import metrics

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "dashboards" / "prometheus"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian's package prometheus has it): the rules were not tested",
)
every_dashboard = pytest.mark.parametrize("described", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def panels(described: Dashboard) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in build(described)["panels"] if panel["type"] != "row")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "everstep.rules.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@every_dashboard
def test_checked_in_dashboard_is_current(described: Dashboard) -> None:
    file = FOLDER / f"{described.name}.json"
    assert file.read_text() == text(described), "run `python -m dashboards.build`"


@every_dashboard
def test_panels_have_ids_titles_units_and_thresholds(described: Dashboard) -> None:
    everything = build(described)["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    titles = [panel["title"] for panel in panels(described)]
    assert len(set(titles)) == len(titles)
    for panel in panels(described):
        assert panel["targets"], panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        steps = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert steps[0] is None, panel["title"]
        assert steps[1:] == sorted(steps[1:]), panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@every_dashboard
def test_panels_stay_on_the_grid_without_overlap(described: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in build(described)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@every_dashboard
def test_series_per_gpu_or_rank_are_aggregated_or_few(described: Dashboard) -> None:
    """Ten thousand GPUs must not become ten thousand lines."""
    for panel in described.panels:
        for query, _ in panel.queries:
            if re.search(r"everstep_(gpu|port|agent|vault)_|rank_lateness", query):
                assert re.search(r"\b(topk|bottomk|sum|avg|max|min|count)\b", query), panel.title


def site_url() -> str:
    """Return the address of the documentation, as its configuration says."""
    (line,) = [line for line in (ROOT / "mkdocs.yml").read_text().splitlines() if line.startswith("site_url:")]
    return line.split()[1]


def test_every_alert_names_an_action_and_a_runbook() -> None:
    assert alerts()
    headings = anchors((ROOT / "docs" / "how-to" / "runbook.md").read_text())
    for alert in alerts():
        annotations = alert["annotations"]
        assert annotations["summary"]
        assert len(annotations["description"].split()) >= 5 or "`everstep" in annotations["description"]
        page, _, anchor = annotations["runbook_url"].partition("#")
        assert page == f"{site_url()}how-to/runbook.html"
        assert anchor == alert["alert"].lower()
        assert anchor in headings
        assert alert["labels"]["severity"] in {"page", "warn"}


def test_queried_series_exist() -> None:
    asked = " ".join([*queries(), *(rule["expr"] for rule in rules())])
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    exported = set(re.findall(r"`((?:everstep|process)_\w+)`", metrics.page()))
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:everstep|process)_\w+", asked)}
    assert names <= exported
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
