"""The import graph names the test files that depend on a file, nearest first."""

from __future__ import annotations

import pytest

from tools.tests_for import ROOT, dependent_tests, main, module_name, references, repository_files

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


def found(*changed: str) -> list[tuple[int, str]]:
    return dependent_tests(changed, FILES)


def test_nearest_tests_come_first() -> None:
    assert found("agent/everstep_agent/clock.py") == [
        (1, "tests/unit/test_clock.py"),  # named after the file
        (2, "tests/unit/test_a_vault.py"),
        (2, "tests/unit/vault/test_life.py"),  # through the conftest.py of its folder
        (4, "tests/unit/test_fleet.py"),  # by main and the command that names it
    ]


def test_program_named_in_a_string_counts() -> None:
    assert found("agent/everstep_agent/main.py") == [(2, "tests/unit/test_fleet.py")]


def test_package_counts_for_its_modules() -> None:
    assert "tests/unit/test_clock.py" in [path for _, path in found("agent/everstep_agent/__init__.py")]


def test_changed_test_file_is_found_itself() -> None:
    assert found("tests/unit/test_alone.py") == [(0, "tests/unit/test_alone.py")]


def test_root_conftest_concerns_every_test() -> None:
    assert [path for _, path in found("tests/conftest.py")] == sorted(path for path in FILES if "/test_" in path)


def test_data_file_is_found_by_name_or_pattern() -> None:
    assert found("docs/scenarios.md") == [(1, "tests/unit/test_docs.py")]
    assert found("tests/scenarios/lemon.txt") == [(1, "tests/scenarios/test_all.py")]


def test_module_names_follow_the_import_path() -> None:
    assert module_name("controller/everstep_controller/core/engine.py") == "everstep_controller.core.engine"
    assert module_name("everstep/wire/__init__.py") == "everstep.wire"
    assert module_name("tests/support/waiting.py") == "tests.support.waiting"


def test_relative_imports_are_resolved() -> None:
    source = "from . import a\nfrom .b import c\nfrom ..d import e\n"
    assert references("pkg.sub.mod", False, source)[0] >= {"pkg.sub.a", "pkg.sub.b", "pkg.d"}
    assert references("pkg.sub", True, source)[0] >= {"pkg.sub.a", "pkg.sub.b", "pkg.d"}


@pytest.fixture
def tools_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command know the files of the tools alone: to parse the whole repository takes four seconds."""
    files = {path: text for path, text in repository_files(ROOT).items() if "tools/" in path}
    monkeypatch.setattr("tools.tests_for.repository_files", lambda root: files)


@pytest.mark.usefixtures("tools_only")
def test_command_prints_this_file_for_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "tools" / "tests_for.py")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "tests/unit/tools/test_tests_for.py"


def test_command_refuses_an_unknown_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no/such.py"])
    assert "no/such.py is not a file" in capsys.readouterr().err


@pytest.mark.usefixtures("tools_only")
def test_command_fails_when_no_test_depends_on_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "tools" / "tests_for.py"), "--distance", "0"]) == 1
    assert capsys.readouterr() == ("", "no test depends on tools/tests_for.py\n")
