"""A corpus of kernel log lines: the agent's findings from each line, compared with the drivers' sources.

Each row of ``kernel_log_corpus.csv`` is a line in the format of a driver (open-gpu-kernel-modules, Linux), and the one
finding that it deserves by NVIDIA's public Xid catalogue, its fabric manager guide, or the kernel's own words; no kind
means no finding.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from everstep.vocabulary import Mode
from everstep_agent.policy.rules import FindingPolicy, load_policy
from tests.support.agents.sensors import TimedAssessor, gpu

CORPUS = Path(__file__).with_name("kernel_log_corpus.csv")
LEAST_SHARE = 0.98
SETTLING_POLLS = 4
"""Polls after a line, so that a memory error without companions is judged."""
DECODED_XIDS = {74, *range(144, 151)}
Row = dict[str, str]


@pytest.fixture(scope="module")
def policy() -> FindingPolicy:
    return load_policy()


@pytest.fixture(scope="module")
def corpus() -> list[Row]:
    with CORPUS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def judge(line: str, policy: FindingPolicy) -> list[tuple[str, str, str, str]]:
    """Return kind (with the XID), severity, action and subject of each finding from a line on a healthy node."""
    assessor = TimedAssessor(policy)
    assessor.polls(1, gpu(pci_bus_id="0000:5d:00"))
    assessor.lines(line)
    assessor.polls(SETTLING_POLLS, gpu(pci_bus_id="0000:5d:00"))
    return [
        (
            f"{finding.kind}/{finding.xid}" if finding.xid is not None else str(finding.kind),
            str(finding.severity),
            str(finding.action),
            finding.subject,
        )
        for finding in assessor.assessor.findings
    ]


def expected(row: Row) -> list[tuple[str, str, str, str]]:
    return [(row["kind"], row["severity"], row["action"], row["subject"])] if row["kind"] else []


def test_corpus_covers_all_groups(corpus: list[Row]) -> None:
    groups = Counter(row["group"] for row in corpus)
    assert len(corpus) >= 600
    assert set(groups) == {"fatal", "warning", "benign", "unknown"}
    assert len({row["line"] for row in corpus}) == len(corpus)


def test_corpus_is_judged_right(corpus: list[Row], policy: FindingPolicy) -> None:
    wrong = [
        f"{row['line']}\n  expected {expected(row)}\n  but was  {made}"
        for row in corpus
        if (made := judge(row["line"], policy)) != expected(row)
    ]
    share = 1 - len(wrong) / len(corpus)
    print(f"{share:.1%} of {len(corpus)} lines of the kernel log are judged right")
    assert share >= LEAST_SHARE, "\n".join(wrong)
    assert not wrong, "\n".join(wrong)


def test_no_benign_line_warns(corpus: list[Row], policy: FindingPolicy) -> None:
    warned = [
        row["line"]
        for row in corpus
        if row["group"] == "benign" and any(made[1] != "info" for made in judge(row["line"], policy))
    ]
    assert warned == []


def test_only_vendors_orders_are_enforced(corpus: list[Row], policy: FindingPolicy) -> None:
    enforced = set()
    for row in corpus:
        assessor = TimedAssessor(policy)
        assessor.polls(1, gpu(pci_bus_id="0000:5d:00"))
        assessor.lines(row["line"])
        if any(finding.mode is Mode.ENFORCE for finding in assessor.assessor.findings):
            assert row["severity"] == "critical", row["line"]
            enforced.add(row["kind"].partition("/")[0])
    assert enforced == {"gpu.xid", "gpu.recovery_action", "gpu.nvlink", "host.kernel"}


def test_decoded_nvlink_errors_are_all_right(corpus: list[Row], policy: FindingPolicy) -> None:
    rows = [row for row in corpus if row["kind"] in {f"gpu.xid/{xid}" for xid in DECODED_XIDS}]
    assert len(rows) > 200
    assert [row["line"] for row in rows if judge(row["line"], policy) != expected(row)] == []
