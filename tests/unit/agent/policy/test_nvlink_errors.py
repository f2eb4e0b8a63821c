"""XID 74 by its registers, and XIDs 144 to 150 by unit, IntrInfo and error status."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.vocabulary import Action, Finding, Mode, Severity
from everstep_agent.findings.assessment import AssessorState
from everstep_agent.policy.nvlink_errors import (
    NVLINK5_XIDS,
    LinkErrorKind,
    decode_link_error,
    load_nvlink5_rules,
    load_register_bits,
)
from everstep_agent.policy.rules import load_policy
from tests.support.agents.sensors import BUS, TimedAssessor

RESET_DEMANDED = f"NVRM: Xid (PCI:{BUS}): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"


def registers(link: int, *values: int) -> str:
    filled = [*values, *[0] * (7 - len(values))]
    shown = ", ".join(f"0x{value:x}" for value in filled)
    return f"NVRM: Xid (PCI:{BUS}): 74, pid=1, name=x, NVLink: fatal error detected on link {link}({shown})"


def nvlink5(xid: int, unit: str, info: int, status: int, word: str = "Nonfatal") -> str:
    return f"NVRM: Xid (PCI:{BUS}): {xid}, {unit} {word} XC0 i0 Link 08 (0x{info:08x} 0x{status:08x} 0x00000000)"


def judged(*lines: str) -> Finding:
    judge = TimedAssessor()
    judge.lines(*lines)
    (finding,) = judge.assessor.findings
    return finding


PARITY = 1 << 4


def test_parity_errors_matter_from_the_third_on_one_link() -> None:
    spread = [registers(link, PARITY) for link in range(18)]
    assert judged(*spread, *spread).action is Action.NONE
    finding = judged(*[registers(3, PARITY)] * 3)
    assert (finding.severity, finding.action, finding.mode) == (Severity.WARNING, Action.REPAIR, Mode.RECOMMEND)
    assert finding.evidence["link"] == "3"


def test_repeated_error_matters_from_the_second_on_one_link() -> None:
    assert judged(registers(1, 1 << 27), registers(2, 1 << 27)).action is Action.NONE
    assert judged(registers(1, 1 << 27), registers(1, 1 << 27)).action is Action.REPAIR


def test_gravest_error_of_several_lines_is_shown() -> None:
    finding = judged(registers(5, 1 << 0), registers(7, 0, 0, 0, 1 << 18), registers(9, 1 << 20))
    assert (finding.action, finding.mode, finding.evidence["link"]) == (Action.REBOOT_NODE, Mode.ENFORCE, "7")
    assert "link 7" in finding.message


def test_undecodable_link_error_only_warns() -> None:
    finding = judged(f"NVRM: Xid (PCI:{BUS}): 74, pid=1, name=python3, Channel 0x23")
    assert (finding.severity, finding.action, finding.mode) == (Severity.WARNING, Action.NONE, Mode.OBSERVE)


def test_driver_demand_outranks_a_decoded_error() -> None:
    judge = TimedAssessor()
    judge.lines(registers(5, 1 << 20), RESET_DEMANDED)
    (finding,) = [finding for finding in judge.assessor.findings if finding.xid == 74]
    assert (finding.severity, finding.action) == (Severity.CRITICAL, Action.RESET_GPU)


def test_site_judgement_outranks_the_registers(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('[[xid]]\nxid = 74\naction = "repair"\nmode = "observe"\nsource = "our vendor"\n')
    judge = TimedAssessor(load_policy([path]))
    judge.lines(registers(5, 0, 0, 0, 1 << 18))
    (finding,) = judge.assessor.findings
    assert (finding.action, finding.mode) == (Action.REPAIR, Mode.OBSERVE)


def test_decoded_error_outlives_the_agent() -> None:
    judge = TimedAssessor()
    judge.lines(registers(7, 0, 0, 0, 1 << 18), *[registers(3, PARITY)] * 2)
    saved = msgspec.json.decode(msgspec.json.encode(judge.assessor.export_state()), type=AssessorState)
    again = TimedAssessor(memory=saved)
    assert [(found.action, found.evidence["link"]) for found in again.assessor.findings] == [(Action.REBOOT_NODE, "7")]


def test_bits_of_the_table_are_those_of_the_catalogue() -> None:
    bits = load_register_bits()
    assert set(bits.values()) == set(LinkErrorKind)
    assert {register for register, _ in bits} == {1, 3, 4, 5}
    assert len(bits) == 42


@pytest.mark.parametrize(("info", "action"), [(0x0C2, Action.NONE), (0x4C2, Action.RESET_GPU)])
def test_promoted_error_before_driver_575_resets(info: int, action: Action) -> None:
    assert judged(nvlink5(145, "RLW_RXPIPE", info, 1)).action is action


@pytest.mark.parametrize(("info", "action"), [(0x06, Action.NONE), (0x86, Action.RESET_GPU), (0x306, Action.NONE)])
def test_promoted_error_since_driver_575_resets(info: int, action: Action) -> None:
    assert judged(nvlink5(145, "RLW_RXPIPE", info, 1)).action is action


def test_gravest_bit_of_an_error_status_counts() -> None:
    assert judged(nvlink5(145, "RLW_SRC_TRACK", 0x07, 0x02 | 0x10)).action is Action.RESET_GPU


def test_numbered_status_is_no_mask() -> None:
    assert judged(nvlink5(149, "NETIR_MFDE_EVENT", 0x14, 0x3)).severity is Severity.INFO
    assert judged(nvlink5(149, "NETIR_MFDE_EVENT", 0x14, 0x5)).action is Action.RESET_GPU
    assert judged(nvlink5(149, "NETIR_MFDE_EVENT", 0x14, 0x6)).action is Action.NONE


def test_reason_of_a_link_down_decides() -> None:
    sleeping, host = 0b100110 << 20 | 0x11, 0b101000 << 20 | 0x11
    assert judged(nvlink5(149, "NETIR_LINK_DOWN", 0x00100011, 0, "Fatal")).action is Action.RESET_GPU
    assert judged(nvlink5(149, "NETIR_LINK_DOWN", sleeping, 0, "Fatal")).action is Action.NONE
    assert judged(nvlink5(149, "NETIR_LINK_DOWN", host, 0, "Fatal")).action is Action.NONE


def test_no_value_fits_both_encodings_differently() -> None:
    for rules in load_nvlink5_rules().values():
        for rule in rules:
            old, new = rule.detail << 20 | rule.before_575, rule.detail << 20 | rule.since_575
            assert rule.promotes(old) is False
            assert rule.promotes(new) is False


@pytest.mark.parametrize("xid", [74, *NVLINK5_XIDS])
@pytest.mark.parametrize("text", ["", "NVRM: Xid", "link 3(0x0, 0x0)", "NETIR Fatal XC0 i0 Link 08 (0x0", "(" * 3000])
def test_broken_line_is_not_decoded(xid: int, text: str) -> None:
    assert decode_link_error(xid, text) is None
