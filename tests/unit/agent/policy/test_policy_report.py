from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep.policy_explanations import RuleExplanation
from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.policy.report import check, explain, site_files
from everstep_agent.policy.rules import POLICY_FOLDER, load_policy

SITE = """
[[rule]]
id = "gpu-too-hot"
threshold = 5
source = "ticket 1"

[[line]]
id = "kernel-oops"
enabled = false
source = "ticket 2"

[[xid]]
xid = 43
severity = "critical"
action = "restart_rank"
source = "ticket 3"

[[benign]]
id = "ours"
contains = "acme: tick"
source = "ticket 4"
"""


@pytest.fixture
def site(tmp_path: Path) -> str:
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    return str(path)


def explained(name: str, *files: str) -> RuleExplanation:
    found = explain(name, files).explanation
    assert found is not None
    return found


def test_check_lists_what_changes(site: str) -> None:
    checked = check([site])
    assert checked.ok
    assert checked.changes["gpu-too-hot: threshold"] == "2.0 -> 5.0"
    assert checked.changes["kernel-oops: enabled"] == "true -> false"
    assert checked.changes["xid 43: severity"] == '"warning" -> "critical"'
    assert checked.changes["ours"] == "new [[benign]]"
    assert check([]).changes == {}


def test_check_names_every_mistake(site: str, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[[rule]]\nid = "gpu-lost"\nmod = "observe"\nsource = "s"\n\n[[lines]]\n')
    checked = check([site, str(other)])
    assert not checked.ok
    assert f"{other} line 3: [[rule]] gpu-lost: unknown key `mod`; did you mean `mode`" in checked.error
    assert f"{other} line 6: unknown key `lines`" in checked.error


def test_values_have_their_file_and_line(site: str) -> None:
    values = explained("gpu-too-hot", site).values
    assert (values["threshold"].value, values["threshold"].origin) == (5.0, f"{site} line 4")
    assert values["metric"].origin.startswith(f"{POLICY_FOLDER / 'gpu.toml'} line ")
    assert values["window_s"].origin == "default"


def test_disabled_rule_makes_no_finding(site: str) -> None:
    found = explained("kernel-oops", site)
    assert (found.enabled, found.finding) == (False, None)


def test_xid_is_explained_by_table_and_site(site: str) -> None:
    found = explained("xid-43", site)
    assert found.finding is not None
    assert (found.finding.severity, found.finding.action) == (Severity.CRITICAL, Action.RESTART_RANK)
    assert found.finding.mode is Mode.ENFORCE
    assert found.values["action"].origin == f"{site} line 15"
    assert found.values["name"].origin.endswith("xids.csv")
    assert found.values["clear_after_s"].value == 600.0
    assert "decoded" in explained("xid-74", site).values


def test_every_shipped_rule_is_explained() -> None:
    policy = load_policy()
    for rule in (*policy.rules, *policy.line_rules)[::10]:
        finding = explained(rule.id).finding
        assert finding is not None
        assert (finding.kind, finding.action, finding.mode) == (rule.kind, rule.action, rule.mode)


def test_unknown_rule_lists_the_known_ones() -> None:
    assert "gpu-lost" in explain("gpu-lozt", ()).names


def test_broken_policy_is_not_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        explain("gpu-lost", [str(tmp_path / "none.toml")])


def test_files_of_the_agents_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_AGENT_SITE_POLICY", "a.toml,b.toml")
    assert site_files([]) == ("a.toml", "b.toml")
    assert site_files(["c.toml"]) == ("c.toml",)
