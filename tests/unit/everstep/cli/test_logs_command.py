"""``everstep logs``: the newest lines of a job's ranks, or where they are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from everstep.cli import logs
from everstep.cli.context import state_dir
from everstep.cli.main import app
from everstep.layout.kept_output import AboutOutput, KeptOutput, make_output_folder, rank_file
from everstep.wire.v1.operator import JobDetail, JobSummary
from everstep.wire.v1.training import JobSpec, Member


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    given = {"XDG_STATE_HOME": str(tmp_path), "COLUMNS": "140"}
    return {**given, "EVERSTEP_CONTROLLER": "http://127.0.0.1:1", "EVERSTEP_TOKEN_FILE": None}


@pytest.fixture
def launcher(environ: dict[str, Any]) -> Iterator[Path]:
    """The folder of a launcher that runs, with ranks 4 and 5."""
    about = AboutOutput(job="vit", node="n2", started_at=100.0, ranks={0: 4, 1: 5})
    folder, lock = make_output_folder(state_dir(environ), about)
    (folder / rank_file(0)).write_text("1.0 first\n2.5 \x1b[32mthird\x1b[0m\x07\n")
    (folder / rank_file(1)).write_text("2.0 second\n")
    (folder / "launcher.log").write_text("0.5 generation 1\n")
    yield folder
    os.close(lock)


def everstep(environ: dict[str, Any], *words: str) -> Result:
    return CliRunner().invoke(app, words, env=environ)


@pytest.mark.usefixtures("launcher")
def test_logs_prints_ranks_in_the_order_of_time(environ: dict[str, Any]) -> None:
    assert everstep(environ, "logs", "vit").stdout == "[rank 4] first\n[rank 5] second\n[rank 4] third\ufffd\n"
    assert everstep(environ, "logs", "vit", "--lines", "1").stdout == "[rank 4] third\ufffd\n"
    assert everstep(environ, "logs", "vit", "--rank", "5").stdout == "second\n"
    assert everstep(environ, "logs", "vit", "--launcher").stdout == "generation 1\n"


def test_logs_of_a_silent_rank_says_so(environ: dict[str, Any], launcher: Path) -> None:
    (launcher / rank_file(1)).unlink()
    result = everstep(environ, "logs", "vit", "--rank", "5")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "nothing was printed yet\n")


@pytest.mark.usefixtures("launcher")
def test_logs_names_the_ranks_that_are_here(environ: dict[str, Any]) -> None:
    result = everstep(environ, "logs", "vit", "--rank", "7")
    assert result.exit_code == 2
    assert "has no output of rank 7 of job vit, but of rank 4, 5" in result.stderr


def test_logs_of_an_unknown_job_says_where_output_is_kept(environ: dict[str, Any]) -> None:
    result = everstep(environ, "logs", "vit")
    assert result.exit_code == 2
    assert "no output of job vit: everstep-launch keeps it on the node of the rank" in result.stderr


def test_logs_command_reports_output_that_is_not_kept(environ: dict[str, Any]) -> None:
    about = AboutOutput(job="vit", node="n2", started_at=100.0, ranks={0: 4}, keeps_ranks=False)
    _, lock = make_output_folder(state_dir(environ), about)
    os.close(lock)
    result = everstep(environ, "logs", "vit")
    assert result.exit_code == 2
    assert "no output of job vit: its launcher has --no-keep-output" in result.stderr.replace("\n", " ")


def test_logs_of_another_node_names_the_node(environ: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    roster = tuple(Member(node=f"n{rank}", local_rank=0, rank=rank) for rank in range(2))
    summary = JobSummary(job="vit", state="running", world_size=2, nodes=2)  # type: ignore[arg-type]
    detail = JobDetail(summary=summary, spec=JobSpec(job="vit"), roster=roster)
    monkeypatch.setattr(logs, "_ask", lambda *_: detail)
    result = everstep(environ, "logs", "vit", "--rank", "1")
    assert "it is kept on n1; run this command there" in result.stderr.replace("\n", " ")


def test_logs_follows_until_the_launcher_ends(
    environ: dict[str, Any], launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = launcher / rank_file(1), os.open(launcher / "lock", os.O_RDONLY)

    def append() -> None:
        path.write_text(path.read_text() + "3.0 fourth\n")

    def rotate() -> None:
        path.rename(f"{path}.1")
        path.write_text("4.0 fifth\n")

    steps = [append, rotate]
    running = [True, True, True, False, False]
    monkeypatch.setattr(KeptOutput, "is_running", property(lambda self: running.pop(0)))
    monkeypatch.setattr(time, "sleep", lambda _: steps.pop(0)())
    result = everstep(environ, "logs", "vit", "--rank", "5", "--follow")
    os.close(held)
    assert result.stdout == "second\nfourth\nfifth\n"
