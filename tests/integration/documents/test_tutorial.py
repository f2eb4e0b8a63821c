"""The tutorial's commands, run in its order, print the outputs that it shows."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.run import free_port
from tests.integration.documents.document_terminal import Terminal, missing_lines, sections
from tests.support.processes.launcher import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TUTORIAL = (ROOT / "docs/start/tutorial.md").read_text()


@pytest.fixture
def directory(short_path: Path) -> Path:
    """An empty directory with the tutorial's script in it, with longer pauses that leave the processors to others."""
    (script,) = (block.text for block in sections(TUTORIAL)[1] if block.language == "python")
    assert "time.sleep(0.05)" in script
    (short_path / "train.py").write_text(script.replace("time.sleep(0.05)", "time.sleep(0.2)"))
    return short_path


@pytest.fixture
def environment(directory: Path, segments: Path) -> dict[str, str]:
    """A reader's environment: this package's commands on PATH, and nothing of Everstep's set."""
    unset = ("EVERSTEP_", "PET_", "OMP_", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    bin_folder = Path(sys.executable).parent
    return kept | {
        "PATH": f"{bin_folder}:{kept['PATH']}",
        "XDG_STATE_HOME": str(directory / "state"),
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "220",
        "EVERSTEP_LAUNCH_SEGMENT_DIR": str(segments),
    }


@pytest.fixture
def segments() -> Iterator[Path]:
    """A directory for checkpoint memory: that of killed processes goes with it."""
    with tempfile.TemporaryDirectory(prefix="everstep-test-", dir="/dev/shm") as name:
        yield Path(name)


def commands(number: int) -> list[str]:
    """The blocks of commands of a section, in order."""
    return [block.text for block in sections(TUTORIAL)[number] if block.language in ("", "bash")]


def shown(number: int) -> list[str]:
    """The printed outputs that a section shows, in order."""
    return [block.text for block in sections(TUTORIAL)[number] if block.language == "text"]


def test_local_run_prints_the_output_in_the_tutorial(directory: Path, environment: dict[str, str]) -> None:
    with (
        Terminal(directory, "first", environment | {"STEPS": "150"}) as first,
        Terminal(directory, "second", environment) as second,
    ):
        (launch, status), (launched, state) = commands(2), shown(2)
        first.begin(launch)
        printed = first.until(lambda text: not missing_lines(launched, text), launched)
        second.show(status, [state])

        (kill,), (regrouped,) = commands(3), shown(3)
        (victim,) = re.findall(r"rank 2 of 4 is process (\d+)", printed)
        second.run(re.sub(r"\d{2,}", victim, kill))
        first.until(lambda text: not missing_lines(regrouped, text[len(printed) :]), regrouped)

        (look,), (generations, events, end) = commands(4), shown(4)
        second.show(look, [generations, events])
        assert "rank 2 of 4" in second.run("everstep logs tutorial --rank 2")
        first.until(lambda text: not missing_lines(end, text), end)


def test_fleet_prints_the_output_in_the_tutorial(directory: Path, environment: dict[str, str], segments: Path) -> None:
    port = str(free_port())

    def commands_of(number: int) -> list[str]:
        texts = [text.replace("7700", port) for text in commands(number)]
        return [re.sub(r"--run-dir \$PWD/(\S+)", rf"\g<0> --segment-dir {segments}/\1", text) for text in texts]

    with Terminal(directory, "fleet", environment) as terminal:
        serve, tokens, look, launch = commands_of(5)
        terminal.run(serve + tokens)
        terminal.show(look, shown(5))
        terminal.run(launch)
        terminal.show("everstep status", [" trio  running  1  3  3 ... step NUMBER ... step NUMBER (g1)"])

        kill, look = commands_of(6)
        terminal.run(kill)
        terminal.show(look, shown(6))

        (restart,) = commands_of(7)
        terminal.show(restart.replace("--follow", "--limit 60"), shown(7))

        (order,) = commands_of(8)
        terminal.show(order, shown(8))

        stop, clean = commands_of(9)
        terminal.run(stop + clean)
        terminal.run("wait")
    assert not list(directory.glob("n*/agent.sock")), "the agents have ended"
