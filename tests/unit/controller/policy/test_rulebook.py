"""Every kind of finding has its rule, each rule its source, and a site overrides single keys."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from pathlib import Path

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Finding, FindingKind, Mode, ProbeKind, Severity
from everstep_controller.core.policy import CorePolicy, Rulebook, VerdictRule, next_ladder_step
from everstep_controller.policy.rulebook import (
    POLICY_FOLDER,
    build_rulebook,
    override_rules,
    read_rules,
    shipped_rulebook,
    with_rules,
)

SHIPPED = [rule for kind in shipped_rulebook().rules_by_kind.values() for rule in kind]


def _site(tmp_path: Path, text: str) -> Path:
    (tmp_path / "site.toml").write_text(textwrap.dedent(text))
    return tmp_path


def load_rulebook(site: Path) -> Rulebook:
    return override_rules(shipped_rulebook(), read_rules(site).values())


@pytest.mark.promise("rules-have-sources")
@pytest.mark.parametrize("kind", FindingKind)
def test_every_finding_kind_has_a_rule(kind: FindingKind) -> None:
    assert shipped_rulebook().rules_by_kind[kind][-1].name == ""


@pytest.mark.parametrize("rule", SHIPPED, ids=lambda rule: rule.id)
def test_every_rule_has_source_and_ends_in_repair(rule: VerdictRule) -> None:
    assert len(rule.source) > 20
    if rule.mode is Mode.ENFORCE and not rule.already_handled:
        assert rule.ladder[-1] is Action.REPAIR
        assert rule.diagnostics[-1] is ProbeKind.ALL_REDUCE


def test_every_rule_key_is_documented() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(VerdictRule)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    documented = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name)
    }
    assert documented == set(VerdictRule.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nladdr = ["repair"]', "line 4: unknown key `laddr`.*`ladder`"),
        ('[[rule]]\nkind = "gpu.xid"\nmode = "observe"', "missing required field `source`"),
        ('[[rule]]\nkind = "gpu.odd"\nsource = "x"', "Invalid enum value 'gpu.odd'"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = ""', "it has no source"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nladder = ["repair", "reset_gpu"]', "weakest first"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nladder = ["none"]', "the actions of a ladder are"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nladder = []', "weakest first"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nn_of_m = [3, 2]', "1 <= n <= m"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nn_of_m = [2, 3]', "give a window_s above zero"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nclear_s = -1', "cannot be negative"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\nrequired_passes = 0', "at least 1"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\ncorrelated_nodes = 1', "at least 2"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\ncorrelated_share = 0', "share of the fleet"),
        ('[[rule]]\nkind = "gpu.xid"\nsource = "x"\n[[rule]]\nkind = "gpu.xid"\nsource = "y"', "is defined twice"),
        ("[[rule", "not TOML"),
    ],
)
def test_invalid_rule_is_refused_with_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load_rulebook(_site(tmp_path, text))


def test_site_rule_overrides_only_given_keys(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        """
        [[rule]]
        kind = "gpu.nvlink"
        mode = "recommend"
        source = "our switches report for nothing until their next firmware"
        """,
    )
    ours, shipped = (
        load_rulebook(site).default_rule(FindingKind.GPU_NVLINK),
        shipped_rulebook().default_rule(FindingKind.GPU_NVLINK),
    )
    assert ours == msgspec.structs.replace(shipped, mode=Mode.RECOMMEND, source=ours.source)
    assert ours.source.startswith("our switches")


def test_named_site_rule_precedes_the_kind_rule(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        """
        [[rule]]
        kind = "gpu.xid"
        name = "quiet"
        xids = [63]
        mode = "observe"
        source = "driver 570.133 raises it for nothing"
        """,
    )
    book = load_rulebook(site)
    finding = Finding(kind=FindingKind.GPU_XID, subject="0", severity=Severity.CRITICAL, message="", xid=63)
    assert book.rule_for(finding).id == "gpu.xid.quiet"
    assert book.rule_for(msgspec.structs.replace(finding, xid=79)).id == "gpu.xid"


def test_folder_without_rule_for_a_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text((POLICY_FOLDER / "gpu.toml").read_text())
    with pytest.raises(ConfigurationError, match=r"without an unnamed default rule: .*network\.port_down"):
        build_rulebook(read_rules(tmp_path))
    with pytest.raises(ConfigurationError, match="is not a directory"):
        load_rulebook(tmp_path / "absent")


@pytest.mark.promise("rules-have-sources")
def test_core_without_rulebook_raises() -> None:
    finding = Finding(kind=FindingKind.GPU_XID, subject="0", severity=Severity.CRITICAL, message="")
    with pytest.raises(AssertionError, match=r"no rule for gpu\.xid"):
        CorePolicy().rules.rule_for(finding)
    assert with_rules(with_rules(CorePolicy())) == with_rules(CorePolicy())


LADDER = (Action.RESTART_RANK, Action.RESET_GPU, Action.REBOOT_NODE, Action.REPAIR)


@pytest.mark.parametrize(
    ("action", "first"),
    [
        (Action.NONE, Action.RESTART_RANK),
        (Action.RESTART_RANK, Action.RESTART_RANK),
        (Action.RESET_GPU, Action.RESET_GPU),
        (Action.DRAIN, Action.REBOOT_NODE),
        (Action.REPAIR, Action.REPAIR),
    ],
)
def test_ladder_starts_at_stronger_action_of_finding(action: Action, first: Action) -> None:
    rule = VerdictRule(kind=FindingKind.GPU_XID, source="test", ladder=LADDER)
    finding = Finding(kind=FindingKind.GPU_XID, subject="0", severity=Severity.CRITICAL, message="", action=action)
    assert LADDER[next_ladder_step(rule, finding, [], 0.0)] is first
