"""Past runs of everstep-launch on this machine, and the receipt of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from everstep.cli import runs
from everstep.cli.context import LocalRun, state_dir
from everstep.cli.main import app
from everstep.receipts.page import render_page
from everstep.receipts.receipt_files import store_receipt
from tests.support.fleet.receipts import BEGAN_AT, full_receipt, receipt


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    given = {"XDG_STATE_HOME": str(tmp_path), "COLUMNS": "140"}
    folder = state_dir(given)
    store_receipt(folder, receipt(job="gpt", result="failed", ended_at=BEGAN_AT + 90))
    store_receipt(folder, full_receipt())
    return {**given, "EVERSTEP_CONTROLLER": None, "EVERSTEP_TOKEN_FILE": None}


def everstep(environ: dict[str, Any], *words: str) -> Result:
    return CliRunner().invoke(app, words, env=environ)


def test_runs_lists_receipts_newest_first(environ: dict[str, Any]) -> None:
    result = everstep(environ, "runs")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [row[:2] for row in rows[2:]] == [["1", "llama"], ["2", "gpt"]]
    assert rows[2][-1] == "finished"
    assert rows[3][-1] == "failed"


def test_runs_as_json_has_receipts_and_their_files(environ: dict[str, Any]) -> None:
    listed = json.loads(everstep(environ, "runs", "--json").stdout)
    assert [(run["number"], run["job"], run["receipt"]["result"]) for run in listed] == [
        (1, "llama", "finished"),
        (2, "gpt", "failed"),
    ]
    assert Path(listed[0]["path"]).exists()


def test_runs_lists_present_runs_first(environ: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here = LocalRun(job="now", url="http://127.0.0.1:9", token_file="none", directory=Path())
    monkeypatch.setattr(runs, "local_runs", lambda _: [here])
    listed = json.loads(everstep(environ, "runs", "--json").stdout)
    assert [(run["number"], run["job"]) for run in listed] == [(0, "now"), (1, "llama"), (2, "gpt")]
    assert listed[0]["receipt"] is None
    assert "unknown" in everstep(environ, "runs").stdout


@pytest.mark.parametrize("name", ["llama", "1"])
def test_runs_show_prints_a_receipt(environ: dict[str, Any], name: str) -> None:
    result = everstep(environ, "runs", "show", name)
    assert result.exit_code == 0, result.output
    assert "job llama finished at step 900: 2 recoveries" in result.stdout
    assert "gpu.xid.79" in result.stdout
    assert ".html" in result.stdout
    shown = json.loads(everstep(environ, "runs", "show", name, "--json").stdout)
    assert shown["recovery_count"] == 2


class Client:
    """A controller that answers with a receipt."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None: ...

    def receipt(self, job: str, **model: float) -> Any:
        assert (job, model) == ("llama", {"checkpoint_interval_s": 3600.0, "restart_s": 60.0})
        return full_receipt()


def test_job_receipt_is_written_as_a_page(
    environ: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.cli.context.Client", Client)
    (tmp_path / "token").write_text("a.token")
    known = {**environ, "EVERSTEP_CONTROLLER": "http://127.0.0.1:9", "EVERSTEP_TOKEN_FILE": str(tmp_path / "token")}
    words = ["job", "receipt", "llama", "--checkpoint-every-min", "60"]
    page = tmp_path / "page.html"
    assert everstep(known, *words, "--html", str(page)).exit_code == 0
    assert page.read_text() == render_page(full_receipt())
    assert "2 recoveries" in everstep(known, *words).stdout
    assert json.loads(everstep(known, *words, "--json").stdout)["job"] == "llama"
    result = everstep(known, *words, "--html", str(tmp_path / "none" / "page.html"))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
