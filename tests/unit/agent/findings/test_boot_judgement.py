from __future__ import annotations

from everstep.vocabulary import Finding, Mode, Severity
from everstep_agent.drivers.samples import EARLIER_BOOT_S, EarlierBoot, HardwareSamples, HostSample
from tests.support.agents.sensors import FELL_OFF, TimedAssessor

PANIC = "Kernel panic - not syncing: Fatal hardware error!"
NEW = HardwareSamples(is_new=True)


def after_boot(judge: TimedAssessor, **records: object) -> list[Finding]:
    earlier = EarlierBoot(**records)  # type: ignore[arg-type]
    judge.polls(1, host=HostSample(uptime_s=60.0), hardware=NEW, earlier_boot=earlier)
    return list(judge.assessor.findings)


def test_panic_is_shown_with_its_time_and_what_came_before() -> None:
    (finding,) = after_boot(TimedAssessor(), panicked_at=1_790_000_000.0, panic_lines=(FELL_OFF, PANIC))
    assert (finding.key, finding.severity, finding.mode) == (
        "host.kernel/earlier-boot",
        Severity.WARNING,
        Mode.OBSERVE,
    )
    assert f"2026-09-21 14:13 UTC: {PANIC}; {FELL_OFF}" in finding.message


def test_fatal_xid_that_a_boot_cured_is_information() -> None:
    (finding,) = after_boot(TimedAssessor(), log_lines=("ordinary", FELL_OFF, FELL_OFF))
    assert (finding.rule, finding.severity, finding.value) == ("host-earlier-fault", Severity.INFO, 1.0)


def test_ordinary_end_of_a_boot_is_no_finding() -> None:
    lines = ("reboot: Restarting system", "Killed process 12 (python3)", "NVRM: Xid (PCI:0000:1b:00): 13, pid=1, x")
    assert after_boot(TimedAssessor(), log_lines=lines) == []


def test_earlier_panic_is_over_after_a_day() -> None:
    judge = TimedAssessor()
    assert after_boot(judge, panicked_at=1.0, panic_lines=(PANIC,))
    assert judge.polls(1, host=HostSample(uptime_s=EARLIER_BOOT_S), hardware=NEW) == set()
