"""Errors of NVSwitches by number and by the severity that the driver prints."""

from __future__ import annotations

import pytest

from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.policy.sxids import Sxid, SxidKind, load_sxid_table, parse_sxid, sxid_rule

ORDER = (Severity.CRITICAL, Action.REBOOT_NODE, Mode.ENFORCE)
ADVICE = (Severity.CRITICAL, Action.REBOOT_NODE, Mode.RECOMMEND)
WARNING = (Severity.WARNING, Action.NONE, Mode.OBSERVE)
INFO = (Severity.INFO, Action.NONE, Mode.OBSERVE)


@pytest.mark.parametrize(
    ("sxid", "word", "judgement"),
    [
        (24007, "Fatal", ORDER),
        (24007, "Non-fatal", INFO),
        (22003, "Fatal", ORDER),
        (22003, "Non-fatal", ADVICE),
        (20034, "Fatal", ADVICE),
        (20034, "Non-fatal", WARNING),
        (12028, "Non-fatal", WARNING),
        (12028, "Fatal", ORDER),
        (11012, "Non-fatal", INFO),
        (26006, "", ADVICE),
        (26008, "", ADVICE),
        (26004, "", WARNING),
        (10004, "", WARNING),
        (10005, "", INFO),
        (10003, "", WARNING),
        (77777, "Fatal", ORDER),
        (77777, "Non-fatal", WARNING),
        (77777, "", WARNING),
    ],
)
def test_number_and_word_decide(sxid: int, word: str, judgement: tuple[Severity, Action, Mode]) -> None:
    rule = sxid_rule(sxid, word)
    assert (rule.severity, rule.action, rule.mode) == judgement


def test_line_is_parsed_with_its_link() -> None:
    line = "nvidia-nvswitch3: SXid (PCI:0000:C1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up (First)"
    assert parse_sxid(line) == Sxid("0000:c1:00.0", 20034, "Fatal", 30)
    assert parse_sxid("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 26006, SOE HALTED") == Sxid(
        "0000:c1:00.0", 26006, "", None
    )


def test_table_has_every_range_of_the_driver() -> None:
    table = load_sxid_table()
    assert {number // 1000 for number in table} == set(range(10, 31))
    assert all(entry.mnemonic and entry.source for entry in table.values())
    assert {entry.kind for entry in table.values()} == set(SxidKind)
