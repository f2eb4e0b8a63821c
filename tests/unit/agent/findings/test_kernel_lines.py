"""Findings from lines of the kernel log: counts, ends, unknown lines and floods."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Finding, Severity
from everstep_agent.drivers.samples import PortSample
from everstep_agent.findings.kernel_lines import MAX_DISTINCT_LINES, MAX_LINE_FINDINGS
from everstep_agent.policy.rules import MAX_PATTERNS_PER_LINE, load_policy
from tests.support.agents.sensors import BUS, TimedAssessor, gpu

SWITCH = "0000:c1:00.0"
SILENT, ANSWERED = "nfs: server 10.1.2.3 not responding, still trying", "nfs: server 10.1.2.3 OK"


def only(judge: TimedAssessor) -> Finding:
    (finding,) = judge.assessor.findings
    return finding


def sxid(text: str, switch: str = SWITCH) -> str:
    return f"nvidia-nvswitch3: SXid (PCI:{switch}): {text}"


# --- clearing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        (SILENT, ANSWERED),
        ("md/raid1:md0: Disk failure on sdb1, disabling device.", "md: md0: recovery done."),
        (
            "megaraid_sas 0000:3b:00.0: 1 - VD 00/0 is now DEGRADED",
            "megaraid_sas 0000:3b:00.0: 2 - VD 00/0 is now OPTIMAL",
        ),
        (
            "device-mapper: multipath: 253:0: Failing path 8:16.",
            "device-mapper: multipath: 253:0: Reinstating path 8:16.",
        ),
        ("mce: CMCI storm detected: switching to poll mode", "mce: CMCI storm subsided: switching to interrupt mode"),
        ("mlx5_core 0000:5c:00.0 eth0: Link down", "mlx5_core 0000:5c:00.0 eth0: Link up"),
        (
            "mlx5_core 0000:5c:00.0: poll_health:801:(pid 0): Fatal error 3 detected",
            "mlx5_core 0000:5c:00.0: mlx5_health_try_recover:341:(pid 9): health recovery succeeded",
        ),
        (
            "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, Cable is shorted",
            "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged",
        ),
        (
            "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 2): Detected insufficient power on the PCIe slot (27W).",
            "mlx5_core 0000:5c:00.0: mlx5_pcie_event:304:(pid 2): PCIe slot advertised sufficient power (75W).",
        ),
    ],
)
def test_line_of_recovery_clears_its_fault(fault: str, end: str) -> None:
    judge = TimedAssessor()
    assert len(judge.lines(fault)) == 1
    assert judge.lines(end) == set()


def test_recovery_of_another_subject_clears_nothing() -> None:
    judge = TimedAssessor()
    assert judge.lines(SILENT, "nfs: server 10.9.9.9 OK") == {"host.disk/10.1.2.3"}


def test_quiet_fault_expires() -> None:
    judge = TimedAssessor()
    judge.lines("watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]")
    assert len(judge.polls(590)) == 1
    assert judge.polls(20) == set()


def test_boot_clears_findings_of_lines() -> None:
    judge = TimedAssessor()
    judge.polls(1)
    judge.lines("Kernel panic - not syncing: Fatal exception", sxid("24007, Fatal, Link 30 sourcetrack timeout"))
    assert len(judge.assessor.findings) == 2
    assert judge.polls(1, boot_id="boot-2") == set()


# --- repetition --------------------------------------------------------------------------------------------------

CORRECTED = "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0)"


def test_corrected_errors_warn_only_when_frequent() -> None:
    judge = TimedAssessor()
    judge.lines(*[CORRECTED] * 9)
    assert only(judge).severity is Severity.INFO
    judge.lines(CORRECTED)
    assert (only(judge).severity, only(judge).rule) == (Severity.WARNING, "memory-corrected-often")


def test_rare_corrected_errors_never_warn() -> None:
    judge = TimedAssessor()
    for _ in range(30):
        judge.lines(CORRECTED)
        judge.clock.advance(3 * 3600.0)
    assert only(judge).severity is Severity.INFO


def test_repeated_lines_are_counted_in_doubling_steps() -> None:
    judge = TimedAssessor()
    updates = sum(judge.assessor.process_kernel_lines([SILENT], judge.now()) for _ in range(5000))
    assert updates <= 14
    assert (only(judge).value, only(judge).evidence["lines"]) == (4096.0, "4096")
    assert judge.assessor.lines.totals == {"nfs-not-responding": 5000}


# --- unknown lines and floods ------------------------------------------------------------------------------------


def test_unknown_driver_lines_are_shown() -> None:
    judge = TimedAssessor()
    lines = [f"NVRM: {word}Something_IMPL: new trouble 0x{word}" for word in "abc"]
    judge.lines(*lines, lines[0])
    finding = only(judge)
    assert (finding.severity, finding.action, finding.rule) == (Severity.WARNING, Action.NONE, "nvidia-unknown-line")
    assert [finding.evidence[f"line {number}"] for number in (1, 2, 3)] == lines


def test_unknown_lines_show_a_bounded_number() -> None:
    judge = TimedAssessor()
    updates = sum(
        judge.assessor.process_kernel_lines([f"NVRM: {'x' * number}_IMPL: new"], judge.now())
        for number in range(1, 3000)
    )
    assert len([name for name in only(judge).evidence if name.startswith("line ")]) == MAX_DISTINCT_LINES
    assert updates <= MAX_DISTINCT_LINES + 14


def test_xid_without_a_known_gpu_is_shown() -> None:
    judge = TimedAssessor()
    judge.lines("NVRM: Xid (GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b): 79, GPU has gone")
    assert "79, GPU has gone" in only(judge).message


def test_grave_line_takes_the_place_of_a_mild_one() -> None:
    judge = TimedAssessor()
    judge.lines(*(f"mlx5_core 0000:{number:02x}:00.0 eth{number}: Link down" for number in range(MAX_LINE_FINDINGS)))
    assert "host.kernel/kernel-panic" in judge.lines("Kernel panic - not syncing: Fatal exception")
    assert len(judge.assessor.findings) == MAX_LINE_FINDINGS


def test_line_that_does_not_fit_is_told() -> None:
    judge = TimedAssessor()
    judge.lines(*(f"nfs: server 10.0.0.{number} not responding" for number in range(MAX_LINE_FINDINGS + 1)))
    (overflow,) = [finding for finding in judge.assessor.findings if finding.rule == "kernel-lines-overflow"]
    assert f"10.0.0.{MAX_LINE_FINDINGS} not responding" in overflow.message


def test_few_patterns_are_tried_on_any_line_of_the_corpus() -> None:
    rules = load_policy().line_rules
    with Path(__file__).with_name("kernel_log_corpus.csv").open(encoding="utf-8", newline="") as file:
        lines = [row["line"] for row in csv.DictReader(file)]
    for line in lines:
        tried = [rule for rule in rules if not rule.contains or any(text in line for text in rule.contains)]
        assert len(tried) < MAX_PATTERNS_PER_LINE, line


def test_every_shipped_line_rule_has_plain_texts() -> None:
    assert [rule.id for rule in load_policy().line_rules if not rule.contains] == []


# --- subjects ----------------------------------------------------------------------------------------------------


def test_link_of_a_switch_names_its_gpu() -> None:
    judge = TimedAssessor()
    far_ends = ("0000:c1:00 link 12", "", "NVSwitch 0000:c1:00 link 30")
    judge.polls(1, gpu(nvlink_far_ends=far_ends))
    judge.lines(sxid("24007, Fatal, Link 30 sourcetrack timeout error (First)"))
    assert (only(judge).evidence["links"], only(judge).evidence["gpus"]) == ("30", f"{BUS} link 2")
    judge.lines(
        sxid("24007, Fatal, Link 12 sourcetrack timeout error"), sxid("24007, Fatal, Link 5 sourcetrack timeout")
    )
    assert only(judge).evidence["links"] == "5, 12, 30"
    assert only(judge).evidence["gpus"] == f"{BUS} link 0, {BUS} link 2"


def test_device_of_a_line_is_named() -> None:
    judge = TimedAssessor()
    port = PortSample(name="mlx5_3", kind="infiniband", up=True, was_up=True, identity={"pci_bus_id": "0000:5c:00.0"})
    judge.polls(1, gpu(), ports=(port,))
    judge.lines("mlx5_core 0000:5c:00.0: temp_warn:157:(pid 0): High temperature on sensors with bit set 0 1")
    assert only(judge).evidence["ports"] == "mlx5_3"
    other = TimedAssessor()
    other.polls(1, gpu())
    other.lines(f"nvidia {BUS}.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)")
    assert only(other).evidence["uuid"] == "GPU-a"


# --- rules of a site ---------------------------------------------------------------------------------------------

LINE = {
    "id": "our-driver",
    "kind": "host.kernel",
    "pattern": "acme: (?P<subject>\\\\w+) broke",
    "severity": "warning",
    "message": "{subject}: {line}",
    "source": "our driver",
}


def site(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_text(text)
    return path


def line_rule(**changes: Any) -> str:
    values = {**LINE, **changes}
    shown = "\n".join(
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in values.items()
    )
    return f"[[line]]\n{shown}\nclear_after_s = 60.0\n"


def test_site_adds_rules_and_benign_lines(tmp_path: Path) -> None:
    benign = '[[benign]]\nid = "ours"\ncontains = "knvlinkSendInbandData"\nsource = "our fabric"\n'
    judge = TimedAssessor(load_policy([site(tmp_path, line_rule() + benign)]))
    assert judge.lines("acme: pump broke", "NVRM: knvlinkSendInbandData_IMPL: Failed to send inband data: 0") == {
        "host.kernel/pump"
    }


def test_site_rule_on_a_driver_line_outranks_the_unknown_line(tmp_path: Path) -> None:
    judge = TimedAssessor(load_policy([site(tmp_path, line_rule(pattern="NVRM: new trouble"))]))
    judge.lines("NVRM: new trouble")
    assert only(judge).rule == "our-driver"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (line_rule(times=3), "needs within_s above zero"),
        (line_rule(clear_pattern="acme: OK"), "clear_pattern and clear_contains together"),
        (line_rule(clear_pattern="(", clear_contains="acme"), "not a regular expression"),
        ('[[benign]]\nid = "x"\ncontains = ""\nsource = "s"\n', "contains must be a text"),
    ],
)
def test_mistake_in_a_line_rule_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_policy([site(tmp_path, text)])
