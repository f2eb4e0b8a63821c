"""The tests of a file are its own, and those that are few imports away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.tests_for import (
    ROOT,
    dependent_tests,
    main,
    references,
    repository_paths,
)

FILES = {
    "agent/everstep_agent/__init__.py": "",
    "agent/everstep_agent/clock.py": "",
    "agent/everstep_agent/vault.py": "from .clock import now\n",
    "agent/everstep_agent/main.py": "def main():\n    import everstep_agent.vault\n",
    "tests/conftest.py": "",
    "tests/support/fleet.py": "COMMAND = ['-m', 'everstep_agent.main']\n",
    "tests/unit/test_clock.py": "from everstep_agent.clock import now\n",
    "tests/unit/test_a_vault.py": "from everstep_agent.vault import Vault\n",
    "tests/unit/vault/conftest.py": "import everstep_agent.clock\n",
    "tests/unit/vault/test_life.py": "",
    "tests/unit/test_fleet.py": "from tests.support.fleet import COMMAND\n",
    "tests/unit/test_alone.py": "import json\n",
    "tests/scenarios/lemon.txt": "",
    "tests/scenarios/test_all.py": "FILES = '*.txt'\n",
    "docs/scenarios.md": "",
    "tests/unit/test_docs.py": "PAGE = 'docs/scenarios.md'\n",
}
REFERENCES = {path: references(path, text) for path, text in FILES.items() if path.endswith(".py")}


def found(*changed: str, most: int = 9) -> list[tuple[int, str]]:
    return dependent_tests(changed, FILES, REFERENCES, most)


def test_nearest_tests_come_first() -> None:
    assert found("agent/everstep_agent/clock.py") == [
        (1, "tests/unit/test_clock.py"),
        (2, "tests/unit/test_a_vault.py"),
        (2, "tests/unit/vault/test_life.py"),  # through the conftest.py of its folder
        (4, "tests/unit/test_fleet.py"),  # by main and the command that names it
    ]


def test_own_tests_come_first_at_any_distance() -> None:
    source, own = "agent/everstep_agent/vault.py", "tests/unit/agent/test_vault_life.py"
    paths = {**FILES, own: ""}
    assert dependent_tests([source], paths, REFERENCES, 1) == [(1, own), (1, "tests/unit/test_a_vault.py")]


@pytest.fixture
def tools_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have the command know the files of the tools alone: to parse the whole repository takes four seconds."""
    paths = [path for path in repository_paths(ROOT) if "tools/" in path]
    monkeypatch.setattr("tools.tests_for.repository_paths", lambda root: paths)
    monkeypatch.setattr("tools.tests_for.CACHE", tmp_path / "references.json")


@pytest.mark.usefixtures("tools_only")
def test_command_prints_this_file_for_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "tools" / "tests_for.py")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "tests/unit/tools/test_tests_for.py"
