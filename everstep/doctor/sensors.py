"""Ask a child process what the agent's sensors read on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from everstep.doctor.results import CheckResult, fail
from everstep.errors import DECODE_ERRORS

SURVEY_TIMEOUT_S = 8.0
"""Seconds that all sensors may take together, so that the command ends within ten."""

KILL_WAIT_S = 0.5

LAST_CHECK = "GPUs"
"""The sensor that is read last, because its driver may hang."""

COMMAND = (sys.executable, "-P", "-m", "everstep_agent.sensors.survey")


def check_sensors(command: Sequence[str] = COMMAND, timeout_s: float = SURVEY_TIMEOUT_S) -> Iterator[CheckResult]:
    """Yield the results of the survey; what has not come in time is a failure of its own."""
    if command is COMMAND and any(importlib.util.find_spec(name) is None for name in ("everstep_agent", "pynvml")):
        yield fail("sensors", "the agent is not installed in this environment: pip install 'everstep[agent]'")
        return
    with tempfile.TemporaryFile() as errors:
        # Not subprocess.run: a child that hangs in a driver cannot be killed, and would be waited for.
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        is_late, output = False, b""
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            is_late, output = True, late.output or b""
            os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(KILL_WAIT_S)
        finally:
            if child.stdout is not None:
                child.stdout.close()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    names = set()
    for line in output.splitlines():
        with suppress(*DECODE_ERRORS):
            result = msgspec.json.decode(line, type=CheckResult)
            names.add(result.check)
            yield result
    if is_late:
        where = f"{LAST_CHECK} (NVML)" if len(names) > 1 else "a sensor"
        yield fail(LAST_CHECK, f"{where} did not answer within {timeout_s:g} s: a driver hangs; see the kernel log")
    elif child.returncode:
        yield fail("sensors", f"the survey ended with status {child.returncode}: {last}")
