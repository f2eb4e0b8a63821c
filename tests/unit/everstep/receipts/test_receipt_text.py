"""The lines of a receipt, and its figures in words."""

from __future__ import annotations

import msgspec
import pytest

from everstep.receipts import text
from everstep.receipts.page import render_page
from everstep.receipts.text import format_span, summary_lines
from everstep.wire.v1.receipts import WorldSize
from tests.support.fleet.receipts import full_receipt, receipt, recovery


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.83, "830 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (119.99, "2 min"),
        (250.0, "4 min 10 s"),
        (7384.0, "2 h 3 min"),
        (5 * 86400.0 + 3 * 3600 + 59, "5 d 3 h"),
    ],
)
def test_span_is_shown_in_the_units_that_fit(seconds: float, text: str) -> None:
    assert format_span(seconds) == text


def test_undisturbed_run_lost_nothing() -> None:
    assert summary_lines(receipt()) == [
        "job llama finished at step 900: 0 recoveries, 0.00 s lost to them",
        "  66 min 40 s on 8 ranks, last loss 2.25, effective time 100.000 %",
    ]


def test_each_recovery_is_listed_with_its_seconds() -> None:
    lines = summary_lines(receipt(recovery(2, 9.0, 0.25, repeated_steps=0), recovery(3, 99.0, None), result="failed"))
    assert lines[:3] == [
        "job llama failed at step 900: 2 recoveries, 0.45 s lost to them",
        "  generation 2: 0.25 s, rank_lost: rank 1 was killed",
        "  generation 3: not completed, rank_lost: rank 1 was killed; 1 step computed again",
    ]
    assert "saved against restarts of 60 s from a checkpoint every 30 min" in lines[4]


def test_eviction_names_rule_and_evidence() -> None:
    lines = summary_lines(full_receipt())
    assert "  node-3: evict by rule gpu.xid.79: XID 79: GPU has fallen off the bus" in lines
    assert "  kept: version 3:800 at /data/llama/step-800" in lines
    assert any("on 8 -> 6 ranks" in line for line in lines)


def test_many_world_sizes_are_shortened() -> None:
    sizes = tuple(WorldSize(at=1.0, generation=number, ranks=number) for number in range(1, 21))
    assert text.format_sizes(receipt(sizes=sizes)) == "1 -> 2 -> 3 -> ... -> 17 -> 18 -> 19 -> 20"


def test_withdrawn_suspicion_is_a_line_of_the_receipt() -> None:
    note = "a suspicion against node-3 was withdrawn: another node got the same gradients"
    made = msgspec.structs.replace(receipt(), audit_notes=(note,))
    assert f"  {note}" in summary_lines(made)
    assert note in render_page(made)
