"""Define the result of a check, and run checks so that none of them raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

import msgspec


class Status(StrEnum):
    """Whether what was checked will do. Only FAIL makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about one thing: what was found and, unless it is well, what to do."""

    check: str
    status: Status
    sentence: str


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results. ``ok``: no check failed."""

    ok: bool
    results: tuple[CheckResult, ...]


Check = Callable[[], Iterable[CheckResult]]


def ok(check: str, sentence: str) -> CheckResult:
    return CheckResult(check=check, status=Status.OK, sentence=sentence)


def warn(check: str, sentence: str) -> CheckResult:
    return CheckResult(check=check, status=Status.WARN, sentence=sentence)


def fail(check: str, sentence: str) -> CheckResult:
    return CheckResult(check=check, status=Status.FAIL, sentence=sentence)


def run_checks(checks: Mapping[str, Check]) -> DoctorReport:
    """Return the results of all checks, by name. A check that raises becomes a warning with the error."""
    results: list[CheckResult] = []
    for name, check in checks.items():
        try:
            results += check()
        except Exception as error:  # noqa: BLE001 - the others are still worth knowing
            results.append(warn(name, f"could not be checked: {type(error).__name__}: {error}"))
    return DoctorReport(ok=all(result.status is not Status.FAIL for result in results), results=tuple(results))
