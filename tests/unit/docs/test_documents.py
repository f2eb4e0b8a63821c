"""Links, make targets, commands, flags, tests, routes, methods and alerts in documents exist."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fastapi.testclient import TestClient

from everstep.cli.policy import _is_for_agents as is_for_agents
from everstep.cli.policy import _read as read_change
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.agent import Domain, Gpu, Host
from everstep.wire.v1.operator_history import Evidence, EvidenceNote
from everstep_agent.policy.rules import load_policy
from everstep_controller.api import web_page
from everstep_controller.config import load_settings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JOB_TRANSITIONS
from everstep_controller.policy import rulebook
from everstep_controller.policy.rulebook import with_rules
from tests.support.documents.command_lines import PROGRAMS, agent_settings, controller_settings, parse
from tests.support.documents.markdown import FENCE, anchors
from tests.support.fleet.controllers import InProcess
from tools.docs_site import rest
from tools.docs_site.hook import PAGES

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOCS = ROOT / "docs"
GENERATED = {DOCS / path for path in PAGES}
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@each_document
def test_every_relative_link_resolves(document: Path) -> None:
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists() or target in GENERATED, f"{link} leads nowhere"
        if anchor and DOCS not in document.parents:  # test_site.py has MkDocs check those of the site
            assert anchor in anchors(target.read_text()), f"{link}: no such heading"


@each_document
def test_every_file_named_in_documents_exists(document: Path) -> None:
    for name in re.findall(
        r"`((?:agent|controller|trainer_hooks|everstep|dashboards|deploy|docs|tests|bench)/[\w./*-]+)`", prose(document)
    ):
        if name.startswith("deploy/secrets"):
            continue
        assert list(ROOT.glob(name.rstrip("/"))), f"{name} is not there"


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text())


@functools.cache
def command_lines(document: Path) -> list[list[str]]:
    """Words of every simple command in a fenced block of no language or of a shell's."""
    found: list[list[str]] = []
    for language, block in FENCE.findall(document.read_text()):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found += simple_commands(re.sub(r"\$(\w+)", r"\1", line))  # a variable stands for any word
    return found


def simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if words:
                yield words
            words = ["redirected:"] if set(word) <= set("<>") else []
        elif words or not re.fullmatch(r"\w+=.*", word):
            words.append(word)


def check(program: str, arguments: list[str]) -> None:
    """Raises Typer's error for refused arguments, and ConfigurationError for impossible settings."""
    if program == "everstep" and arguments[:1] == ["replay"]:  # it hands its words on
        program = "everstep-controller"
    command, _ = parse(program, arguments)
    if command == "serve":
        controller_settings(arguments, {})
    elif command == "everstep-agent":
        agent_settings(arguments, {})


@each_document
def test_every_documented_command_is_accepted(document: Path) -> None:
    for program, *arguments in command_lines(document):
        if program not in PROGRAMS:
            continue
        try:
            check(program, arguments)
        except typer.Exit:
            pass  # --version or --help
        except typer.exceptions.TyperException as error:
            pytest.fail(f"{program} {' '.join(arguments)}: {error.format_message()}")


@each_document
def test_every_documented_settings_file_is_accepted(document: Path, tmp_path: Path) -> None:
    for language, block in FENCE.findall(document.read_text()):
        if language != "toml":
            continue
        file = tmp_path / "shown.toml"
        file.write_text(block)
        if is_for_agents(file):
            load_policy([file])
        elif tomllib.loads(block).keys() <= {"policy", "rule"}:  # a change to be tried, or a file in policy_dir
            change = read_change(file)
            assert rulebook.check_change(with_rules(CorePolicy()), change).error == ""
        else:
            load_settings({"secret_file": "secret", "settings": str(file)}, {})


@each_document
def test_every_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [words[1] for words in command_lines(document) if words[0] == "make" and len(words) > 1]
    called += re.findall(r"`make ([a-z-]+)", prose(document))
    assert set(called) <= targets


def test_documents_call_every_program() -> None:
    """The checks above would pass on documents they cannot read."""
    called = {words[0] for document in DOCUMENTS for words in command_lines(document)}
    assert called >= {*PROGRAMS, "make"}


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@each_document
def test_every_test_named_in_documents_exists(document: Path) -> None:
    for path, name in TEST.findall(document.read_text()):
        assert (ROOT / path).is_file(), path
        assert name in functions_of(path), f"{path}::{name}"


def rows(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    text = (ROOT / document).read_text().split(f"{heading}\n", 1)[1]
    table = re.search(r"^\|.*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return cells[2:]


def section(document: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level."""
    level = heading.partition(" ")[0]
    text = FENCE.sub("", (ROOT / document).read_text())
    assert f"\n{heading}\n" in text, f"{document} has no {heading}"
    return re.split(rf"^{level} ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_promise_has_a_name_of_its_own() -> None:
    promises = re.findall(r"^\* (.*)$", section("docs/concepts/guarantees.md", "## Promises"), re.MULTILINE)
    names = [re.match(r"\*\*`([a-z0-9-]+)`\*\* ", promise) for promise in promises]
    assert None not in names
    assert len(promises) == len({name[1] for name in names if name}) > 20


def test_every_file_of_gpu_tests_is_on_the_page() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", section("docs/how-to/gpu.md", "## Tests that need a GPU")))
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    assert named == {str(path.relative_to(ROOT)) for path in files if path != Path(__file__)}


def test_rest_page_has_the_routes_of_the_application(tmp_path: Path) -> None:
    controller = InProcess(f"sqlite:///{tmp_path / 'controller.db'}")
    with TestClient(controller):
        assert controller.controller is not None
        served = routes_of(controller.controller.app)
    written = set(re.findall(r"^\| ([A-Z]+) \| \[`(.+?)`\]", rest.routes_page(), re.MULTILINE))
    page = {*(("GET", path) for path in web_page.PAGES), *(("GET", f"/web/{name}") for name in web_page.FILES)}
    assert written | {("GET", "/openapi.json")} | page == served  # it describes neither itself nor the web page


def routes_of(application: Any) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for route in application.routes:
        found |= {(method, route.path) for method in route.methods - {"HEAD"}}
    return found


def test_every_alert_is_documented() -> None:
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "everstep.rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    headings = re.findall(r"^## (Everstep\w+)$", (ROOT / "docs/how-to/runbook.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts)


def drawn_states(document: str) -> set[str]:
    """The states in the diagrams of a page that stand before its table of states."""
    text = (ROOT / document).read_text().partition("| state |")[0]
    diagrams = [block for kind, block in FENCE.findall(text) if kind == "mermaid"]
    ends = re.findall(r"^ *(\S+) --> ([^\s:]+)", "\n".join(diagrams), re.MULTILINE)
    return {state for pair in ends for state in pair} - {"[*]"}


def test_transitions_of_jobs_are_drawn() -> None:
    text = (ROOT / "docs/concepts/job-states.md").read_text().partition("| state |")[0]
    (diagram,) = [block for kind, block in FENCE.findall(text) if kind == "mermaid"]
    drawn = set(re.findall(r"^ *(\w+) --> (\w+)", diagram, re.MULTILINE))
    assert drawn == {(before, after) for before, states in JOB_TRANSITIONS.items() for after in states}


def test_every_state_is_drawn_and_explained() -> None:
    nodes, jobs = "docs/concepts/node-states.md", "docs/concepts/job-states.md"
    assert {row[0] for row in rows(nodes, "## States")} == drawn_states(nodes) == set(NodeState)
    assert {row[0] for row in rows(jobs, "# The life of a job")} == drawn_states(jobs) == set(JobState)


PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "rest-examples-findings.md").read_text()
LIST = PAGE.partition("The document has these fields:\n\n")[2].partition("\n\n")[0]
ITEMS = [item.partition(": ")[::2] for item in re.split(r"^- ", LIST, flags=re.MULTILINE)[1:]]


def _named(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.promise("vendor-document")
def test_evidence_page_names_every_field_once() -> None:
    fields = [name for names, _ in ITEMS for name in _named(names)]
    assert sorted(fields) == sorted(Evidence.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "kind"), [("domain", Domain), ("host", Host), ("gpus", Gpu), ("history", EvidenceNote)]
)
def test_evidence_page_names_fields_of_parts(field: str, kind: type[Domain | Host | Gpu | EvidenceNote]) -> None:
    (text,) = [text for names, text in ITEMS if field in _named(names)]
    assert set(kind.__struct_fields__) <= set(_named(text))
