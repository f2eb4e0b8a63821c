"""Run every example of the REST pages with bash and curl against a controller; answers have the shape shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep_controller.api.routes import (
    CREDENTIAL_ROUTES,
    HISTORY_ROUTES,
    OPERATOR_ROUTES,
    PLAIN_ROUTES,
    POLICY_ROUTES,
)
from everstep_controller.server.responses import TITLES, TYPE_PREFIX
from tests.support.fleet.controllers import SECRET, controller_process
from tests.support.fleet.fleet_with_faults import FleetWithFaults, write_settings
from tests.support.processes.fork_pool import ForkPool
from tools.docs_site import client_methods

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGES = (
    "rest-examples-basics.md",
    "rest-examples-nodes.md",
    "rest-examples-findings.md",
    "rest-examples-jobs.md",
    "rest-examples-events.md",
    "rest-examples-policy.md",
    "rest-examples-credentials.md",
    "rest-errors.md",
)
"""In the order in which they are read: examples rely on those before them."""
PROGRAMS = ("bash", "curl", "jq", "openssl")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]

BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OMITTED = re.compile(r",?\s*\.\.\.(?=\s*[}\]])")
STREAM_S = 1
CURL_BROKE_OFF, CURL_REFUSED = 28, 22
OF_VAULTS = {"checkpoint", "digest_mismatch", "not_restorable", "slot_memory"}
"""Codes that no controller answers with."""


@dataclass(frozen=True)
class Step:
    """A command and its output in the document."""

    command: str
    shown: str

    @property
    def streams(self) -> bool:
        return "/events/stream" in self.command

    @property
    def method(self) -> str:
        return "POST" if "--json" in self.command else "GET"


@dataclass(frozen=True)
class Outcome:
    status: int
    http: str
    output: str
    complaint: str


def text() -> str:
    """Return all pages, one after another."""
    return "\n".join((REFERENCE / page).read_text() for page in PAGES)


def setup() -> str:
    """Return the commands that a reader types once, before the examples."""
    return "\n".join(block for language, block in BLOCK.findall(text()) if language == "sh")


def examples() -> list[tuple[Step, ...]]:
    """The blocks of commands with their answers, in the order of the document."""
    blocks = [block for language, block in BLOCK.findall(text()) if language == "console"]
    return [tuple(_steps(block)) for block in blocks]


def _steps(block: str) -> Iterator[Step]:
    for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = command.splitlines()
        last = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
        yield Step("\n".join(lines[: last + 1]), "\n".join(lines[last + 1 :]).strip())


class Terminal:
    """A folder and an environment in which a person types the examples; curl says each HTTP status on stderr."""

    def __init__(self, folder: Path, controller: str) -> None:
        self.folder = folder
        token = folder / "olga.token"
        token.write_text(mint(SECRET, TokenRole.OPERATOR, "olga") + "\n")
        (folder / ".curlrc").write_text('write-out = "%{stderr}HTTP %{http_code}\\n"\nmax-time = 60\n')
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "EVERSTEP_CONTROLLER": controller,
            "EVERSTEP_TOKEN_FILE": str(token),
        }

    def run(self, command: str) -> Outcome:
        shell = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(
            shell, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=120, check=False
        )
        http = re.findall(r"^HTTP (\d+)$", done.stderr, re.MULTILINE)
        return Outcome(done.returncode, http[-1] if http else "", done.stdout.strip(), done.stderr)

    def play(self, step: Step) -> Outcome:
        """Runs an example; a stream, which has no end, for a moment."""
        return self.run(step.command.replace("curl ", f"curl --max-time {STREAM_S} ") if step.streams else step.command)


class Reading:
    """A person who reads the document from its beginning, and types every example once."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._examples = examples()
        self._outcomes: list[list[Outcome]] = []

    def up_to(self, number: int) -> list[tuple[Step, Outcome]]:
        """Block ``number``, after all before it: what it shows may follow from them."""
        while len(self._outcomes) <= number:
            block = self._examples[len(self._outcomes)]
            self._outcomes.append([self._terminal.play(step) for step in block])
        return list(zip(self._examples[number], self._outcomes[number], strict=True))


@pytest.fixture(scope="module")
def reading(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    folder = tmp_path_factory.mktemp("examples")
    with controller_process(folder, program_forks, arguments=("--settings", str(write_settings(folder)))) as process:
        FleetWithFaults(process.ask, process).wait_for_progress()
        home = folder / "olga"
        home.mkdir()
        terminal = Terminal(home, process.url)
        done = terminal.run(setup())
        assert done.status == 0, done.complaint
        yield Reading(terminal)


MORE = "..."
"""The key of an object of which the document leaves something out."""


def read_shown(text: str) -> Any:
    """The JSON that a document shows, in which ``...`` at the end of an object or a list stands for more."""
    return json.loads(OMITTED.sub(_leave_out, text))


def _leave_out(match: re.Match[str]) -> str:
    closing = match.string[match.end() :].lstrip()[0]
    return f'{"," if match[0].startswith(",") else ""} "{MORE}": 0' if closing == "}" else ""


def complaint_about(shown: Any, real: Any, place: str = "answer") -> str:
    """How the shape of ``real`` differs from what is shown; empty where it does not. Of values the words of sentences
    count, as far as they are shown; numbers and ids in them do not, since times are among them.

    Each entry of a list that is shown must look like some real one.
    """
    if isinstance(shown, dict) and isinstance(real, dict):
        wanted = shown.keys() - {MORE}
        if wanted - real.keys() or (MORE not in shown and real.keys() - wanted):
            return f"{place}: shown are {sorted(shown)}, answered {sorted(real)}"
        return next(filter(None, (complaint_about(shown[key], real[key], f"{place}.{key}") for key in wanted)), "")
    if isinstance(shown, list) and isinstance(real, list):
        return next(filter(None, (_unlike_all(item, real, f"{place}[{i}]") for i, item in enumerate(shown))), "")
    alike = _kind(shown) == _kind(real) and (place.split(".")[-1] not in SENTENCES or _says(shown, real))
    return "" if alike else f"{place}: shown is {shown!r}, answered {real!r}"


SENTENCES = ("sentence", "complaint", "reason", "breaker", "detail", "title")
"""Keys of what is said in words."""


def _says(shown: str, real: str) -> bool:
    words, left_out, _ = shown.partition("...")
    expected, actual = _numberless(words.rstrip() if left_out else words), _numberless(real)
    return actual.startswith(expected) if left_out else actual == expected


def _numberless(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?", "0", text)


def _unlike_all(shown: Any, reals: list[Any], place: str) -> str:
    complaints = [complaint_about(shown, real, place) for real in reals]
    return min(complaints, key=bool, default=f"{place}: the list is empty")


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _frames(text: str) -> list[dict[str, str]]:
    """Server-sent events: fields by name."""
    return [
        dict(line.partition(": ")[::2] for line in frame.splitlines()) for frame in text.split("\n\n") if frame.strip()
    ]


def _streamed(text: str) -> list[Any]:
    return [{**frame, "data": read_shown(frame["data"])} if "data" in frame else frame for frame in _frames(text)]


def check_output(step: Step, output: str) -> None:
    if step.shown.startswith(("{", "[")):
        assert complaint_about(read_shown(step.shown), json.loads(output)) == ""
    elif step.streams:
        assert complaint_about(_streamed(step.shown), _streamed(output)) == ""
    else:
        first = [line.split()[:1] for line in step.shown.splitlines()]
        assert [line.split()[:1] for line in output.splitlines()] == first


def _name(block: tuple[Step, ...]) -> str:
    path = re.search(r"EVERSTEP_CONTROLLER/([\w./-]+)", block[0].command)
    return path[1].replace("/", "-") if path else block[0].command.split()[0]


@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")
@pytest.mark.parametrize("number", range(len(examples())), ids=[_name(block) for block in examples()])
def test_examples_answer_as_shown(reading: Reading, number: int) -> None:
    for step, done in reading.up_to(number):
        output = f"{step.command}\n{done.output}\n{done.complaint}"
        if TYPE_PREFIX in step.shown:
            assert (done.status, done.http) == (CURL_REFUSED, str(read_shown(step.shown)["status"])), output
        else:
            assert done.status == (CURL_BROKE_OFF if step.streams else 0), output
            assert done.http[:1] in ("", "2"), output
        check_output(step, done.output)


def _asks_for(step: Step, method: str, path: str) -> bool:
    route = re.sub(r"\{\w+\}", r"[^/?]+", path)
    asked = re.escape("$EVERSTEP_CONTROLLER") + route + r'(?=[?"\s]|$)'
    return step.method == method and re.search(asked, step.command) is not None


def test_examples_cover_every_operator_route() -> None:
    steps = [step for block in examples() for step in block]
    routes = {**OPERATOR_ROUTES, **HISTORY_ROUTES, **POLICY_ROUTES, **CREDENTIAL_ROUTES, **PLAIN_ROUTES}.values()
    without = [
        (route.method, route.path)
        for route in routes
        if not any(_asks_for(step, route.method, route.path) for step in steps)
    ]
    assert without == []


def test_errors_page_lists_every_code() -> None:
    page = (REFERENCE / "rest-errors.md").read_text()
    codes = {code for cell in re.findall(r"^\| (`.*?`) \| \d+ \|", page, re.M) for code in re.findall(r"`(\w+)`", cell)}
    assert codes == TITLES.keys() - OF_VAULTS - {"protocol", "http"}


@pytest.mark.parametrize(
    ("shown", "real", "differs"),
    [
        ('{"a": 1, "b": [1, ...]}', {"a": 2, "b": [3, 4]}, False),
        ('{"a": 1, ...}', {"a": 2, "b": 3}, False),
        ('{"a": 1}', {"a": 2, "b": 3}, True),
        ('{"a": 1, ...}', {"b": 3}, True),
        ('{"a": {"b": null}}', {"a": {"b": "text"}}, True),
        ('[{"a": 1}]', [{"b": 1}, {"a": 2}], False),
        ('[{"a": 1}]', [], True),
        ('{"a": {...}}', {"a": {"b": 1}}, False),
        ('{"sentence": "1 eviction in 30 s"}', {"sentence": "1 eviction in 29.5 s"}, False),
        ('{"sentence": "1 evictions in 30 s"}', {"sentence": "1 eviction in 30 s"}, True),
        ('{"sentence": "n1: gone; ..."}', {"sentence": "n1: gone; generation 2"}, False),
        ('{"sentence": "n1: gone; ..."}', {"sentence": "n1: lost; generation 2"}, True),
    ],
)
def test_examples_compare_shapes_and_sentences(shown: str, real: Any, differs: bool) -> None:
    assert bool(complaint_about(read_shown(shown), real)) is differs


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_examples_of_client_page_run(
    program_forks: ForkPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "olga.token"
    token.write_text(mint(SECRET, TokenRole.OPERATOR, "olga"))
    with controller_process(tmp_path, program_forks) as process:
        monkeypatch.setenv("EVERSTEP_CONTROLLER", process.url)
        monkeypatch.setenv("EVERSTEP_TOKEN_FILE", str(token))
        names: dict[str, Any] = {}
        for example in EXAMPLES:
            exec(compile(example, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert "0 nodes, 0 jobs" in shown
    assert "olga issued" in shown
    assert "there is no node-17" in shown


def test_methods_page_names_every_route_with_its_parameters() -> None:
    routes = {name: (route, answer) for name, route, answer in client_methods.methods()}
    assert routes["drain"] == ("POST /v1/nodes/{node}/drain", "ChangeResult")
    assert routes["nodes"] == ("GET /v1/nodes", "entries of NodeList")
    assert "| `resize_job` | `POST /v1/jobs/{job}/resize` | `ChangeResult` |" in client_methods.page()
