"""Generated pages have everything that the code has: commands, flags, settings, metrics, findings, rules and events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml
from everstep_agent.config import AgentSettings
from everstep_agent.findings.rules import load_policy
from everstep_controller.api.openapi import document
from everstep_controller.config import ControllerSettings, OidcSettings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.rulebook import shipped_rulebook
from everstep_trainer.config import HookSettings

from everstep.vocabulary import Decision, FindingKind
from tests.support.command_lines import PROGRAMS
from tools.docs_site import commands, events, findings, markdown, metrics, rest, scenarios, settings

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
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        flags = [flag for one in options for flag in one.opts if "completion" not in one.name]
        assert [flag for flag in flags if flag not in ("-h", "--help") and f"`{flag}`" not in section] == []


@pytest.mark.parametrize(
    ("page", "struct"),
    [
        (settings.agent_page, AgentSettings),
        (settings.controller_page, ControllerSettings),
        (settings.policy_page, CorePolicy),
        (settings.trainer_page, HookSettings),
    ],
    ids=["agent", "controller", "policy", "trainer"],
)
def test_settings_page_describes_every_setting(page: Any, struct: type[msgspec.Struct]) -> None:
    text = page()
    for name in set(struct.__struct_fields__) - {"policy", "policy_origins", "rules", "oidc"}:
        section = text.split(f"### `{name}`\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
        assert "Default: " in section
        assert len(section.strip().split("\n\n", 1)[1]) > 10, f"{name} has no description"


def test_controller_page_describes_settings_of_logins() -> None:
    text = settings.controller_page()
    for name in OidcSettings.__struct_fields__:
        section = text.split(f"### `oidc_{name}`\n", 1)[1].split("\n### ", 1)[0]
        assert f"`--oidc-{name.replace('_', '-')}`" in section
        assert f"`EVERSTEP_CONTROLLER_OIDC_{name.upper()}`" in section


def test_settings_page_names_flag_and_variable() -> None:
    assert "Flag: `--run-dir` · Variable: `EVERSTEP_AGENT_RUN_DIR`" in settings.agent_page()
    named = "Flag: `--policy-lost-after-s` · Variable: `EVERSTEP_CONTROLLER_POLICY_LOST_AFTER_S`"
    assert named in settings.policy_page()
    assert "Flag: `--controller` · Variable: `EVERSTEP_AGENT_CONTROLLER`" in settings.agent_page()


def test_rest_pages_have_every_route_and_model() -> None:
    api, page, models = document(), rest.routes_page(), rest.models_page()
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            section = page.split(f"\n## {method.upper()} `{path}` ", 1)[1].split("\n## ", 1)[0]
            assert [one["name"] for one in operation["parameters"] if f"`{one['name']}`" not in section] == []
    for name, schema in api["components"]["schemas"].items():
        section = models.split(f"\n## {name} ", 1)[1].split("\n## ", 1)[0]
        assert [field for field in schema.get("properties", {}) if f"`{field}`" not in section] == []


def test_metrics_page_has_what_alerts_and_rules_use() -> None:
    page = metrics.page()
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "everstep.rules.yml").read_text())
    expressions = " ".join(str(rule["expr"]) for group in rules["groups"] for rule in group["rules"])
    used = set(re.findall(r"\beverstep_(?:agent|controller|gpu|vault)_\w+", expressions))
    assert len(used) > 20
    missing = {name for name in used if f"`{re.sub(r'_(bucket|count|sum)$', '', name)}`" not in page}
    assert missing == set()


def test_metrics_page_names_labels_of_empty_families() -> None:
    assert "| `everstep_controller_job_state` | gauge | `run`, `state` |" in metrics.page()


def test_findings_page_has_every_kind_and_rule() -> None:
    page, policy = findings.page(), load_policy()
    names = [*FindingKind, *(rule.id for rule in (*policy.rules, *policy.line_rules)), *map(str, policy.xid_entries)]
    names += [rule.id for rules in shipped_rulebook().rules_by_kind.values() for rule in rules]
    assert [name for name in names if not re.search(rf"\| `?{re.escape(name)}`? \|", page)] == []


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


def test_events_page_shows_sentences() -> None:
    assert "| `node.registered` | &lt;node&gt; joined the fleet" in events.page()


def test_transcripts_page_has_every_scenario() -> None:
    page = scenarios.page()
    names = [path.stem for path in (ROOT / "tests" / "scenarios").glob("*.txt")]
    assert len(names) > 50
    assert [name for name in names if f"{{ #{name} }}" not in page] == []


def test_table_leaves_out_empty_columns_and_escapes() -> None:
    assert markdown.table(("A", "B", "C"), [("a|b", "", "c\nd")]) == "| A | C |\n|---|---|\n| a\\|b | c d |\n"
