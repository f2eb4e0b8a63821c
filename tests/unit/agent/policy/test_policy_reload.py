"""A site's policy files that change while the agent runs, and the findings and histories that are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep.vocabulary import Mode, Severity
from everstep_agent.drivers.samples import HostSample
from everstep_agent.policy.reload import PolicyWatch
from everstep_agent.policy.rules import load_policy
from tests.support.agents.sensors import FELL_OFF, TimedAssessor, gpu

HOT = 'id = "gpu-too-hot"\nsource = "ticket"\n'
OOPS = "Oops: 0000 [#1] SMP"


def loaded(watch: PolicyWatch) -> bool:
    """Let the watch check until it has loaded the files or found a mistake, at most twice. Return whether it did."""
    return watch.check() or watch.check()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(f"[[rule]]\n{HOT}threshold = 5\n")
    return path


@pytest.fixture
def watch(file: Path) -> PolicyWatch:
    return PolicyWatch([str(file)])


def threshold(watch: PolicyWatch) -> float:
    (rule,) = [rule for rule in watch.policy.rules if rule.id == "gpu-too-hot"]
    return rule.threshold


def test_unchanged_file_is_not_loaded_again(watch: PolicyWatch, file: Path) -> None:
    os.utime(file, (1, 1))
    assert not loaded(watch)


def test_replaced_file_is_loaded_at_the_second_look(watch: PolicyWatch, file: Path) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(file.read_text().replace("5", "7"))
    os.replace(draft, file)
    assert not watch.check()
    assert watch.check()
    assert (threshold(watch), watch.error) == (7, "")
    assert not loaded(watch)


def test_half_written_file_is_not_loaded(watch: PolicyWatch, file: Path) -> None:
    file.write_text("")
    assert not watch.check()
    file.write_text(f"[[rule]]\n{HOT}threshold = 6\n")
    assert not watch.check()
    assert watch.check()
    assert (threshold(watch), watch.error) == (6, "")


@pytest.mark.parametrize(
    ("text", "message"), [("[[rule]]\nid =", "not TOML"), ("", "the file is empty"), ("[[rule]]\nid = 'x'\n", "line 1")]
)
def test_broken_file_leaves_the_policy_in_force(watch: PolicyWatch, file: Path, text: str, message: str) -> None:
    good = file.read_text()
    file.write_text(text)
    assert loaded(watch)
    assert threshold(watch) == 5
    assert message in watch.error
    assert not loaded(watch)
    file.write_text(good)
    assert loaded(watch)
    assert watch.error == ""


def test_unreadable_file_leaves_the_policy_in_force(watch: PolicyWatch, file: Path) -> None:
    file.unlink()
    assert loaded(watch)
    assert "No such file" in watch.error
    file.mkdir()  # root may read any file, but no folder
    assert loaded(watch)
    assert "Is a directory" in watch.error
    assert threshold(watch) == 5


def test_broken_file_is_refused_at_the_start(file: Path) -> None:
    file.write_text("[[rule]]")
    with pytest.raises(ConfigurationError, match="needs its id"):
        PolicyWatch([str(file)])


def test_last_policy_stays_in_force_at_the_start(watch: PolicyWatch, file: Path) -> None:
    file.write_text("")
    again = PolicyWatch([str(file)], watch.texts)
    assert threshold(again) == 5
    assert "the file is empty" in again.error
    assert again.texts == watch.texts
    file.write_text(f"[[rule]]\n{HOT}threshold = 6\n")
    assert loaded(again)
    assert (threshold(again), again.error) == (6, "")


def test_last_policy_of_other_files_is_not_used(watch: PolicyWatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        PolicyWatch([str(tmp_path / "other.toml")], watch.texts)


# --- histories and findings across a change ----------------------------------------------------------------------


class Site:
    """An assessor whose site file changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "site.toml"
        self.judge = TimedAssessor()

    def change(self, text: str) -> set[str]:
        self._path.write_text(text)
        self.judge.assessor.change_policy(load_policy([self._path]))
        return self.judge.keys()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


HOT_KEY = "gpu.temperature/0000:1b:00"
hot = gpu(temperature_margin_c=1)
(POLLS,) = {rule.n_of_m[0] for rule in load_policy().rules if rule.id == "gpu-too-hot"}


def test_counts_of_an_unchanged_rule_go_on(site: Site) -> None:
    assert site.judge.polls(POLLS - 1, hot) == set()
    site.change(f"[[rule]]\n{HOT.replace('gpu-too-hot', 'gpu-memory-too-hot')}threshold = 90\n")
    assert site.judge.polls(1, hot) == {HOT_KEY}


def test_changed_severity_changes_the_standing_finding(site: Site) -> None:
    site.judge.polls(POLLS, hot)
    (before,) = site.judge.assessor.findings
    assert site.change(f'[[rule]]\n{HOT}severity = "info"\nmode = "observe"\n') == {HOT_KEY}
    (after,) = site.judge.assessor.findings
    assert (after.severity, after.mode, after.source) == (Severity.INFO, Mode.OBSERVE, "ticket")
    assert (after.since, after.trace) == (before.since, before.trace)


def test_finding_stays_while_its_value_is_still_bad(site: Site) -> None:
    site.judge.polls(POLLS, hot)
    assert site.change(f"[[rule]]\n{HOT}threshold = 1.5\n") == {HOT_KEY}
    assert site.change(f"[[rule]]\n{HOT}threshold = 0.5\n") == set()
    assert site.judge.polls(POLLS, hot) == set()


def test_removed_rule_clears_its_findings(site: Site) -> None:
    site.judge.polls(POLLS, hot)
    assert site.change(f"[[rule]]\n{HOT}enabled = false\n") == set()
    assert site.judge.polls(POLLS, hot) == set()
    site.change("# none\n")
    assert site.judge.polls(POLLS, hot) == {HOT_KEY}


def test_rule_on_another_metric_begins_anew(site: Site) -> None:
    site.judge.polls(POLLS, hot)
    change = 'metric = "gpu.temperature_c"\ncriterion = "at_least"\nthreshold = 0\n'
    assert site.change(f"[[rule]]\n{HOT}{change}") == set()


def test_line_findings_follow_their_rules(site: Site) -> None:
    site.judge.lines(OOPS, FELL_OFF)
    oops = '[[line]]\nid = "kernel-oops"\nsource = "ticket"\n'
    assert "host.kernel/kernel-oops" in site.change(f'{oops}severity = "critical"\n')
    assert {finding.severity for finding in site.judge.assessor.findings} == {Severity.CRITICAL}
    assert "host.kernel/kernel-oops" not in site.change(f'{oops}pattern = "kernel BUG at "\n')
    site.change("# none\n")
    site.judge.lines(OOPS)
    benign = '[[benign]]\nid = "test-kernel"\ncontains = "0000 [#1] SMP"\nsource = "ticket"\n'
    assert site.change(benign) == {"gpu.xid/0000:1b:00/79"}


def test_xid_finding_takes_the_changed_judgement(site: Site) -> None:
    site.judge.lines(FELL_OFF)
    site.change('[[xid]]\nxid = 79\nmode = "recommend"\nsource = "ticket"\n')
    (finding,) = site.judge.assessor.findings
    assert (finding.mode, finding.severity) == (Mode.RECOMMEND, Severity.CRITICAL)


def test_shorter_window_keeps_the_newest_results(site: Site) -> None:
    site.judge.polls(3, hot)
    site.change(f"[[rule]]\n{HOT}n_of_m = [4, 4]\n")
    assert site.judge.polls(1, hot) == {HOT_KEY}


def test_change_before_the_first_poll_does_no_harm(site: Site) -> None:
    assert site.change(f"[[rule]]\n{HOT}threshold = 3\n") == set()
    assert site.judge.polls(1, host=HostSample(uptime_s=86_400.0)) == set()
