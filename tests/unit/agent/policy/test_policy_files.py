from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.policy.rules import ClearEvent, FindingPolicy, FindingRule, load_policy, metrics_of
from everstep_agent.policy.xids import load_xid_table

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


# --- changes of single keys --------------------------------------------------------------------------------------


def change(**values: object) -> str:
    """Return a change of the shipped rule gpu-too-hot, or of another with ``id``."""
    written = {"id": "gpu-too-hot", "source": "ticket 4711", **values}
    return "[[rule]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in written.items())


def rule_of(policy: FindingPolicy, name: str) -> FindingRule:
    (rule,) = [rule for rule in policy.rules if rule.id == name]
    return rule


def test_change_replaces_only_its_keys(tmp_path: Path) -> None:
    shipped = rule_of(load_policy(), "gpu-too-hot")
    policy = load_policy([site(tmp_path, change(threshold=5, n_of_m=[2, 3]))])
    expected = msgspec.structs.replace(shipped, threshold=5, n_of_m=(2, 3), source="ticket 4711")
    assert rule_of(policy, "gpu-too-hot") == expected


def test_complete_rule_inherits_nothing(tmp_path: Path) -> None:
    text = RULE.replace("gpu-too-hot", "gpu-lost").replace("gpu.temperature_c", "gpu.is_lost").replace("80", "1")
    rule = rule_of(load_policy([site(tmp_path, text)]), "gpu-lost")
    assert (rule.action, rule.mode) == (Action.NONE, Mode.RECOMMEND)


def test_later_site_file_changes_the_earlier_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(change(threshold=5, severity="info"))
    second.write_text(change(threshold=7))
    rule = rule_of(load_policy([first, second]), "gpu-too-hot")
    assert (rule.threshold, rule.severity) == (7, Severity.INFO)


def test_rules_and_lines_are_turned_off(tmp_path: Path) -> None:
    off = '[[{}]]\nid = "{}"\nenabled = false\nsource = "ticket"\n'
    names = {"rule": "gpu-too-hot", "line": "kernel-oops", "benign": "nvidia-loading"}
    policy = load_policy([site(tmp_path, "".join(off.format(*each) for each in names.items()))])
    left = {each.id for each in policy.rules} | {each.id for each in policy.line_rules}
    left |= {each.id for each in policy.benign_lines}
    assert left.isdisjoint(names.values())


def test_lines_and_clearings_are_changed_by_key(tmp_path: Path) -> None:
    text = '[[line]]\nid = "kernel-oops"\nseverity = "critical"\nsource = "ticket"\n'
    text += '[[xid_clearing]]\naction = "none"\nclear_after_s = 60.0\n'
    policy = load_policy([site(tmp_path, text)])
    (oops,) = [rule for rule in policy.line_rules if rule.id == "kernel-oops"]
    assert (oops.severity, oops.action) == (Severity.CRITICAL, Action.REBOOT_NODE)
    assert policy.xid_clearing[Action.NONE].clear_after_s == 60.0
    assert ClearEvent.BOOT in policy.xid_clearing[Action.NONE].clear_on


LINE = (
    '[[line]]\nid = "ours"\nkind = "host.kernel"\npattern = "{0}"\ncontains = ["{0}"]\nseverity = "info"\n'
    'message = "m"\nsource = "s"\nclear_after_s = 1.0\n'
)
BENIGN = '[[benign]]\nid = "quiet"\ncontains = "{}"\nsource = "s"\n'


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (change(id="gpu-to-hot", threshold=5), 1, "did you mean `gpu-too-hot`"),
        (change(id="kernel-oops", mode="observe"), 1, r"the rule of this id is a \[\[line\]\]"),
        (RULE.replace("gpu-too-hot", "kernel-oops").lstrip(), 1, r"a \[\[line\]\] has this id already"),
        ('[[rule]]\nid = "gpu-too-hot"\nthreshold = 5\n', 1, "give the source"),
        (change(source=" "), 3, "the source is empty"),
        ("[[rule]]\nthreshold = 5\n", 1, "needs its id"),
        (change(threshold=5) + change(threshold=6), 5, "defined twice, first at .* line 1"),
        (change(treshold=5), 4, "did you mean `threshold`"),
        ("[rule]\nid = 'x'\n", 1, r"write rule as \[\[rule\]\]"),
        ("[[rules]]\nid = 'x'\n", 1, "did you mean `rule`"),
        (change(metric="gpu.uuid"), 4, "no sensor gives it"),
        (change(threshold=5, severity="info", mode="enforce", action="drain"), 6, "drain cannot be enforced"),
        (change(id="host-memory-low", threshold=3), 4, "write 3 percent as 0.03"),
        (change(id="gpu-pcie-replays", threshold=0), 4, "must be above zero"),
        (change(window_s=60.0), 4, "has no window_s"),
        (change(n_of_m=[5, 86400]), 4, "<= 3600"),
        (change(clear_after_s=-1.0), 4, "number of seconds"),
        (change(message="{value.x}"), 4, "may use {subject}"),
        (change(id="gpu-hung", threshold=300), 1, "graver rule gpu-hung-long"),
        ("[[xid]]\nxid = 63\nsource = 's'\n", 1, "it changes nothing"),
        ('[[line]]\nid = "kernel-oops"\nclear_on = ["reset"]\nsource = "s"\n', 3, "would never clear"),
        (LINE.format("acme: lost") + BENIGN.format("acme: "), 1, "quiet has its lines"),
        (LINE.format("NVRM: news") + "is_fallback = true\n", 1, "fallback nvidia-unknown-line"),
        ("".join(LINE.format("acme").replace("ours", f"r{n}") for n in range(9)), 73, "8 rules have its texts"),
        ("", None, "the file is empty"),
    ],
)
def test_contradiction_is_named_with_its_line(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    path = site(tmp_path, text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_policy([path])
    assert f"{path}{'' if line is None else f' line {line}'}:" in str(caught.value)


def test_benign_line_that_hides_a_shipped_rule_is_named(tmp_path: Path) -> None:
    hiding = BENIGN.format("EDAC ")
    with pytest.raises(ConfigurationError, match=r"memory-uncorrected.*\[\[benign\]\] quiet"):
        load_policy([site(tmp_path, hiding)])
    names = ("memory-uncorrected", "memory-corrected", "memory-corrected-often")
    off = "".join(f'[[line]]\nid = "{name}"\nenabled = false\nsource = "s"\n' for name in names)
    load_policy([site(tmp_path, hiding + off)])


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    text = change(treshold=5) + change(id="gpu-lost", severity="bad") + change(id="gpu-stale", window_s=0.0)
    with pytest.raises(ConfigurationError) as caught:
        load_policy([site(tmp_path, text)])
    assert len(str(caught.value).splitlines()) == 3


def test_metrics_are_the_numbers_of_a_sample() -> None:
    names = metrics_of(GpuSample)
    assert {"temperature_c", "lost", "is_lost", "hardware_throttled"} <= set(names)
    assert not {"uuid", "links", "error", "nvlinks_down_at"} & set(names)


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
