"""The explained consequence of a finding is that of the judgement, and values of rules have their places."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from everstep.policy_explanations import ExplanationRequest
from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep_controller.app.explain_command import run
from everstep_controller.core.judgement.verdicts import FindingReport, Response, judge
from everstep_controller.core.policy import CorePolicy
from everstep_controller.policy.consequences import explain_consequence, key_origins
from everstep_controller.policy.rulebook import (
    POLICY_FOLDER,
    policy_document,
    policy_from_document,
    shipped_rulebook,
    with_rules,
)
from tests.support.fleet.core_fleet import CoreFleet

SHIPPED = with_rules(CorePolicy())

WORDS = {
    Response.NOTHING: "nothing",
    Response.ADVISE: "nothing",
    Response.RECOMMEND: "a person decides",
    Response.RESTART_RANKS: "ranks are restarted",
    Response.TRY_PAIR: "diagnostics (pair) show which node is at fault",
    Response.EVICT: "the node is evicted",
}


def finding(kind: FindingKind = FindingKind.GPU_LOST, **values: object) -> Finding:
    chosen = {"severity": Severity.CRITICAL, "action": Action.DRAIN, "mode": Mode.ENFORCE, **values}
    return Finding(kind=kind, subject="s", message="m", **chosen)  # type: ignore[arg-type]


def sentence(policy: CorePolicy = SHIPPED, **values: object) -> str:
    return explain_consequence(policy, finding(**values), "as shipped").sentence  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FindingKind)
def test_consequence_is_that_of_the_judgement(kind: FindingKind) -> None:
    fleet = CoreFleet(SHIPPED)
    fleet.start(6)
    fleet.state.nodes["n2"].identity.booted_at = -1e6
    for severity, action, mode in itertools.product(Severity, Action, Mode):
        given = finding(kind, severity=severity, action=action, mode=mode)
        count = SHIPPED.rules.rule_for(given).n_of_m[0]
        judged = judge(fleet.state, FindingReport(node="n2", finding=given, count=count), fleet.now, "")
        explained = explain_consequence(SHIPPED, given, "")
        assert WORDS[judged.response] in explained.sentence, given
        if judged.response is not Response.ADVISE:
            assert explained.mode is judged.mode


def test_weaker_mode_of_both_is_named() -> None:
    assert "The weaker of the two modes holds, recommend" in sentence(mode=Mode.RECOMMEND)
    counted = sentence(kind=FindingKind.GPU_XID, xid=13, severity=Severity.WARNING, mode=Mode.OBSERVE)
    assert "once 2 of the last 3 reports" in counted
    assert "the mode of the controller's rule alone holds" in counted


def test_remediation_mode_decides_who_resets() -> None:
    assert "waits for a person to reboot node" in sentence()
    enforcing = SHIPPED.with_values(remediation={"mode": Mode.ENFORCE})
    assert "reboot node is requested" in sentence(enforcing)


def test_place_of_each_key_is_its_newest_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('[[rule]]\nkind = "gpu.lost"\nmode = "observe"\nsource = "ticket"\n')
    origins = key_origins([POLICY_FOLDER, tmp_path])
    assert origins["gpu.lost"]["mode"] == f"{tmp_path / 'site.toml'} line 3"
    assert origins["gpu.lost"]["ladder"].startswith(f"{POLICY_FOLDER / 'gpu.toml'} line ")
    assert set(origins) == {rule.id for rules in shipped_rulebook().rules_by_kind.values() for rule in rules}


def test_settings_file_gives_the_policy(tmp_path: Path) -> None:
    site = tmp_path / "rules"
    site.mkdir()
    (site / "site.toml").write_text('[[rule]]\nkind = "gpu.lost"\nmode = "recommend"\nsource = "ticket"\n')
    settings = tmp_path / "controller.toml"
    settings.write_text(f'policy_dir = "{site}"\n')
    consequence = run(ExplanationRequest(finding=finding()), [str(settings)]).consequence
    assert consequence is not None
    assert (consequence.controller_mode, consequence.mode) == (Mode.RECOMMEND, Mode.RECOMMEND)
    assert str(site) in consequence.policy
    explained = run(ExplanationRequest(rule="gpu.lost"), [str(settings)]).explanation
    assert explained is not None
    assert explained.values["mode"].origin == f"{site / 'site.toml'} line 3"


def test_document_of_a_running_controller_gives_the_policy() -> None:
    policy = SHIPPED.with_values(remediation={"mode": Mode.ENFORCE})
    document = policy_document(policy, {"gpu.lost": "/etc/rules: mode"})
    assert policy_from_document(document) == policy
    request = ExplanationRequest(finding=finding(), document=document, origin="the controller c1")
    consequence = run(request, []).consequence
    assert consequence is not None
    assert "reboot node is requested" in consequence.sentence
    asked = msgspec.structs.replace(request, finding=None, rule="gpu.lost")
    explained = run(asked, []).explanation
    assert explained is not None
    assert explained.values["mode"].origin == "default"
    assert explained.values["ladder"].origin == "the controller c1, /etc/rules: mode"


def test_unknown_rule_lists_the_known_ones() -> None:
    assert "gpu.xid.application" in run(ExplanationRequest(rule="gpu.xid.other"), []).names
