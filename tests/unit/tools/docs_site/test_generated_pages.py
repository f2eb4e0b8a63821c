"""Generated pages have everything that the code has: commands, flags, settings, metrics, findings, rules and events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from everstep.vocabulary import Decision
from everstep_agent.config import PROGRAM as AGENT_PROGRAM
from everstep_agent.policy.rules import load_policy
from everstep_agent.policy.sxids import load_sxid_table
from everstep_controller.api.openapi import document
from everstep_controller.config import PROGRAM
from everstep_controller.core.policy import CorePolicy
from everstep_trainer.config import HookSettings
from tests.support.documents.command_lines import PROGRAMS
from tools.docs_site import commands, events, metrics, rest, settings, signals

ROOT = Path(__file__).parents[4]


PAGES = {
    "everstep": commands.everstep_page,
    "everstep-agent": commands.agent_page,
    "everstep-controller": commands.controller_page,
    "everstep-launch": commands.launch_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_program_page_has_every_command_and_flag(name: str) -> None:
    page = PAGES[name]()
    root: Any = typer.main.get_command(PROGRAMS[name][0])
    for path, command in commands.leaves(root, name):
        section = page if command is root else page.split(f"\n## {path}\n", 1)[1].split("\n## ", 1)[0]
        options = [
            parameter for parameter in command.params if parameter.param_type_name == "option" and not parameter.hidden
        ]
        flags = [flag for option in options for flag in option.opts if "completion" not in option.name]
        assert [flag for flag in flags if flag not in ("-h", "--help") and f"`{flag}`" not in section] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        (settings.agent_page, [each.path[-1] for each in AGENT_PROGRAM.settings.values()]),
        (settings.controller_page, [each.name for each in PROGRAM.settings.values() if len(each.path) == 1]),
        (settings.trainer_page, HookSettings.__struct_fields__),
    ],
    ids=["agent", "controller", "trainer"],
)
def test_settings_page_describes_every_setting(page: Any, names: Sequence[str]) -> None:
    text = page()
    for name in names:
        _check_entry(text, name)


def test_policy_page_describes_every_setting() -> None:
    text = settings.policy_page()
    for name in CorePolicy().values():
        _check_entry(text, name)


def _check_entry(text: str, name: str) -> None:
    section = text.split(f"### `{name}`\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    assert "Default: " in section
    assert len(section.strip().split("\n\n", 1)[1]) > 10, f"{name} has no description"


def test_rest_pages_have_every_route_and_model() -> None:
    api, page, models = document(), rest.routes_page(), rest.models_page()
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            section = page.split(f"\n## {method.upper()} `{path}` ", 1)[1].split("\n## ", 1)[0]
            assert [
                parameter["name"] for parameter in operation["parameters"] if f"`{parameter['name']}`" not in section
            ] == []
    for name, schema in api["components"]["schemas"].items():
        section = models.split(f"\n## {name} ", 1)[1].split("\n## ", 1)[0]
        assert [field for field in schema.get("properties", {}) if f"`{field}`" not in section] == []


def test_metrics_page_lists_metrics_of_alerts_and_rules() -> None:
    page = metrics.page()
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "everstep.rules.yml").read_text())
    expressions = " ".join(str(rule["expr"]) for group in rules["groups"] for rule in group["rules"])
    used = set(re.findall(r"\beverstep_(?:agent|controller|gpu|vault)_\w+", expressions))
    assert len(used) > 20
    missing = {name for name in used if f"`{re.sub(r'_(bucket|count|sum)$', '', name)}`" not in page}
    assert missing == set()


def test_signals_page_has_every_rule_and_number() -> None:
    page, policy = signals.page(), load_policy()
    names = [*(rule.id for rule in policy.line_rules), *(benign.id for benign in policy.benign_lines)]
    names += map(str, (*policy.xid_entries, *load_sxid_table()))
    assert [name for name in names if not re.search(rf"\| `?{re.escape(name)}`? \|", page)] == []
    assert "| 144 | SAW_MVB | 0 | 0x021 | 0x01 | 0x00000002 | `reset_gpu` |" in page
    assert "| 4 | 18 | fabric reset | critical | reboot_node |" in page.replace("|  |", "|")


def test_events_page_has_kinds_of_every_part() -> None:
    kinds = {kind for kind, _ in events.event_kinds()}
    assert kinds >= {
        "finding",
        "node.lost",
        "rank.lost",
        "job.created",
        "job.<state>",
        "operator.<action>",
        "database.unavailable",
    }
    assert len(Decision) > 1
    assert "verdict.<decision>" in kinds
