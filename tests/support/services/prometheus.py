"""A real Prometheus on loopback, with the scrape file of ``deploy/`` and the rules of ``dashboards/``."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml

from bench.peers.run import free_port

ROOT = Path(__file__).parents[3]
SCRAPE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
RULES = ROOT / "dashboards" / "prometheus" / "everstep.rules.yml"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian's package has it): the dashboards' queries were not run",
)

Series = dict[str, Any]


class Prometheus:
    """A Prometheus that scrapes ``targets`` every 250 ms. As a context manager it ends its process.

    Only addresses, token files, intervals and the time that an alert waits differ from the shipped files.

    Args:
        folder: Folder for the configuration and the data.
        targets: Addresses to scrape, by job name of the scrape file.
        token_files: File with the token for scraping, by job name.
        hold: Time that an alert waits before it fires; None for the shipped time.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Sequence[str]],
        token_files: Mapping[str, Path],
        hold: str | None = None,
    ) -> None:
        self._targets = sum(map(len, targets.values()))
        self._address = f"127.0.0.1:{free_port()}"
        config = _configuration(folder, targets, token_files, hold)
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        flags += [f"--web.listen-address={self._address}", "--log.level=error"]
        self._process = subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def ask(self, query: str) -> list[Series]:
        """Return the result of an instant query. Raises HTTPError with Prometheus' message for a bad query."""
        return self._ask("query", query=query)

    def ask_range(self, query: str, seconds: float) -> list[Series]:
        """Return the result of a query over the last ``seconds``, as a panel with a time axis requests it."""
        now = float(self.ask("time()")[1])  # type: ignore[arg-type]
        return self._ask("query_range", query=query, start=now - seconds, end=now, step=max(1.0, seconds / 20))

    def _ask(self, endpoint: str, **parameters: object) -> list[Series]:
        url = f"http://{self._address}/api/v1/{endpoint}?" + urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(url, timeout=120) as answer:
            result: list[Series] = json.load(answer)["data"]["result"]
            return result

    def has_scraped(self) -> bool:
        """Return whether every target has answered."""
        try:
            return len(self.ask("up == 1")) == self._targets
        except OSError:
            return False


def _configuration(
    folder: Path, targets: Mapping[str, Sequence[str]], token_files: Mapping[str, Path], hold: str | None
) -> Path:
    path, rules = folder / "prometheus.yml", folder / "rules.yml"
    quick = RULES.read_text().replace("interval: 15s", "interval: 500ms").replace("for: 2m", "for: 1s")
    if hold is not None:
        quick = re.sub(r"for: \w+", f"for: {hold}", quick)
    rules.write_text(quick.replace("job_step[1m]", "job_step[3s]"))
    shipped = yaml.safe_load(SCRAPE.read_text())
    shipped["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    shipped["rule_files"] = [str(rules)]
    for scraped in shipped["scrape_configs"]:
        name = scraped["job_name"]
        scraped.pop("dns_sd_configs", None)
        scraped["static_configs"] = [{"targets": list(targets[name])}]
        scraped["authorization"] = {"credentials_file": str(token_files[name])}
    path.write_text(yaml.safe_dump(shipped))
    return path
