"""People and programs that look at a controller while its agents keep it busy: ``python -m bench.load.visitors``.

Each request is a connection of its own, as curl's or a load balancer's, and is due at a fixed time: what it waited for
an earlier one counts. A line on standard input is answered with what was measured since the one before.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

from bench.load.statistics import Distribution, summary
from everstep.bearer_tokens import TokenRole, mint

PATHS = ("/healthz", "/v1/nodes?limit=50")
EACH_S = 0.1
"""Between two requests for the same path."""
TIMEOUT_S = 30.0


class _Visitor(threading.Thread):
    """Asks for one path again and again."""

    def __init__(self, address: str, headers: dict[str, str], path: str, offset_s: float) -> None:
        super().__init__(daemon=True)
        self._address, self._headers, self._path, self._offset_s = address, headers, path, offset_s
        self._waits, self._lateness = array("d"), array("d")
        self._failed = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        due = time.perf_counter() + self._offset_s
        while True:
            time.sleep(max(0.0, due - time.perf_counter()))
            woke = time.perf_counter()
            ok = self._ask()
            with self._lock:
                self._waits.append(time.perf_counter() - due)
                self._lateness.append(woke - due)
                self._failed += not ok
            due += EACH_S

    def _ask(self) -> bool:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._path, headers=self._headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def sample(self) -> dict[str, Any]:
        with self._lock:
            told = {"waits": summary(self._waits), "lateness": summary(self._lateness), "failed": self._failed}
            self._waits, self._lateness, self._failed = array("d"), array("d"), 0
        return told


class Visit:
    """What one path's visitors waited, how late they were themselves, and how many were not answered."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.waits = Distribution([told["waits"]])
        self.lateness = Distribution([told["lateness"]])
        self.failed = int(told["failed"])


class Visitors:
    """The process, from outside. ``end`` it."""

    def __init__(self, address: str, secret_file: Path) -> None:
        command = [sys.executable, "-m", "bench.load.visitors", address, str(secret_file)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def sample(self) -> dict[str, Visit]:
        """By path, since the last one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("sample\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the visitors died")
        return {path: Visit(told) for path, told in json.loads(line).items()}

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)


def main(address: str, secret_file: str) -> None:
    token = mint(Path(secret_file).read_bytes().strip(), TokenRole.VIEWER, "visitor")
    headers = {"Authorization": f"Bearer {token}"}
    visitors = {path: _Visitor(address, headers, path, place * EACH_S / 2) for place, path in enumerate(PATHS)}
    for visitor in visitors.values():
        visitor.start()
    for _ in sys.stdin:
        sys.stdout.write(json.dumps({path: visitor.sample() for path, visitor in visitors.items()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
