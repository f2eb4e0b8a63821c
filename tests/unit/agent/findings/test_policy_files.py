from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.findings.rules import ClearEvent, load_policy
from everstep_agent.findings.xids import load_xid_table

RULE = """
[[rule]]
id = "gpu-too-hot"
kind = "gpu.temperature"
metric = "gpu.temperature_c"
criterion = "at_least"
threshold = 80
severity = "warning"
message = "GPU {subject} is at {value} degC"
clear_after_s = 60.0
source = "our own cooling"
"""


def site(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_text(text)
    return path


def test_every_shipped_rule_has_a_source_and_an_end() -> None:
    policy = load_policy()
    for rule in [*policy.rules, *policy.line_rules]:
        assert rule.source, rule.id
        assert rule.clear_after_s is not None or rule.clear_on, rule.id


def test_site_rule_replaces_the_shipped_rule_of_the_same_id(tmp_path: Path) -> None:
    policy = load_policy([site(tmp_path, RULE)])
    (rule,) = [rule for rule in policy.rules if rule.id == "gpu-too-hot"]
    assert (rule.threshold, rule.source) == (80, "our own cooling")
    assert len(policy.rules) == len(load_policy().rules)


def test_site_overrides_single_columns_of_the_xid_table(tmp_path: Path) -> None:
    path = site(tmp_path, '[[xid]]\nxid = 63\naction = "reset_gpu"\nmode = "enforce"\nsource = "our vendor"\n')
    policy = load_policy([path])
    assert (policy.get_xid_entry(63).action, policy.get_xid_entry(63).severity) == (
        Action.RESET_GPU,
        load_xid_table()[63].severity,
    )
    assert policy.get_xid_mode(63) is Mode.ENFORCE


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ("threshold", "treshold", "did you mean `threshold`"),
        ("gpu.temperature_c", "gpu.temprature_c", "unknown metric 'gpu.temprature_c'"),
        ("gpu.temperature_c", "cpu.temperature_c", "must begin with one of"),
        ('"at_least"', '"above"', "Invalid enum value 'above'"),
        ("80", '"hot"', "Expected `float`"),
        ("{value}", "{valeu}", "may use {subject}"),
        ("clear_after_s = 60.0", "", "would never clear"),
        ("threshold = 80", "threshold = 80\nn_of_m = [3, 2]", "1 <= n <= m"),
        ('criterion = "at_least"', 'criterion = "increase"', "needs window_s"),
        ("threshold = 80", "threshold = ", "not TOML"),
    ],
)
def test_mistake_in_a_policy_is_named_with_its_file(tmp_path: Path, was: str, becomes: str, says: str) -> None:
    path = site(tmp_path, RULE.replace(was, becomes))
    with pytest.raises(ConfigurationError) as caught:
        load_policy([path])
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_policy_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        load_policy([tmp_path / "nowhere.toml"])


def test_invalid_pattern_is_refused(tmp_path: Path) -> None:
    text = (
        '[[line]]\nid="x"\nkind="host.kernel"\npattern="("\nseverity="info"\nmessage="m"\nsource="s"\nclear_after_s=1.0'
    )
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        load_policy([site(tmp_path, text)])


def test_every_fatal_xid_has_a_remediation() -> None:
    table = load_xid_table()
    for entry in table.values():
        if entry.severity is Severity.CRITICAL:
            assert Action.strongest(entry.action, Action.RESET_GPU) is entry.action, entry


NUMBERS_OF_DRIVER_595 = (
    *(13, 14, 16, 19, 20, 21, 22, 23, *range(27, 37), *range(39, 46), 47, 48, *range(58, 66), *range(68, 106)),
    *(108, 110, *range(119, 177)),
)
"""Numbers that nverror.h of driver 595.45.04 names."""


def test_xid_table_has_every_number_of_the_driver() -> None:
    table = load_xid_table()
    assert len(NUMBERS_OF_DRIVER_595) == 133
    assert [number for number in NUMBERS_OF_DRIVER_595 if number not in table] == []
    assert [number for number in range(1, 177) if number not in table] == []
    assert all(entry.source for entry in table.values())


def test_every_xid_action_has_a_clearing() -> None:
    policy = load_policy()
    for action in Action:
        clearing = policy.xid_clearing[action]
        assert clearing.clear_after_s is not None or ClearEvent.BOOT in clearing.clear_on
