"""The last lines of ranks over HTTP: only of launchers on this machine, bounded, and no other file."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from everstep.layout.kept_output import AboutOutput, make_output_folder, rank_file
from everstep.wire.v1 import operator as op
from everstep_controller.api import job_output
from tests.support.fleet.controllers import OPERATOR, AgentClient, InProcess, Refused, get, joined
from tests.support.fleet.in_process_fleet import running_job

Lines = dict[int, list[str]]
PATH = "/v1/jobs/j/output"


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def client(tmp_path: Path, state_dir: Path) -> Iterator[TestClient]:
    app = InProcess(f"sqlite:///{tmp_path / 'c.db'}", launcher_state_dir=str(state_dir))
    with TestClient(app) as client:
        yield client


def keep(state_dir: Path, node: str, lines: Lines, *, started_at: float = 1.0, keeps_ranks: bool = True) -> Path:
    """Keep lines by local rank, as an ended launcher of job ``j`` has left them."""
    about = AboutOutput(job="j", node=node, started_at=started_at, keeps_ranks=keeps_ranks)
    folder, lock = make_output_folder(state_dir, about)
    os.close(lock)
    for local_rank, texts in lines.items():
        (folder / rank_file(local_rank)).write_text("".join(f"{at}.5 {text}\n" for at, text in enumerate(texts)))
    return folder


def ask(client: TestClient, query: str = "") -> op.JobOutput:
    output: op.JobOutput = get(client, PATH + query, op.JobOutput, OPERATOR)
    return output


def printed(answer: op.JobOutput) -> dict[int, list[str]]:
    return {rank_output.rank: [line.text for line in rank_output.lines] for rank_output in answer.ranks}


def test_output_has_last_lines_of_ranks_on_this_machine(client: TestClient, state_dir: Path) -> None:
    running_job(client, "n1", "n2")
    keep(state_dir, "n2", {0: ["a", "b", "c"]})
    answer = ask(client, "?lines=2")
    assert printed(answer) == {1: ["b", "c"]}
    assert (answer.ranks[0].node, answer.ranks[0].lines[-1].at, answer.kept_ranks) == ("n2", 2.5, 1)
    assert answer.sentence.startswith("Other ranks are on n1, where the launcher keeps the output.")
    assert answer.command == "everstep logs j"
    assert printed(ask(client, "?rank=1")) == {1: ["a", "b", "c"]}
    elsewhere = ask(client, "?rank=0")
    assert (elsewhere.ranks, elsewhere.command) == ((), "everstep logs j --rank 0")
    assert elsewhere.sentence.startswith("Rank 0 is on n1, ")


def test_output_of_fleet_controller_names_the_command(tmp_path: Path) -> None:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        running_job(client, *(f"n{number}" for number in range(1, 11)))
        answer = ask(client)
        assert (answer.ranks, answer.kept_ranks, answer.command) == ((), 0, "everstep logs j")
        assert re.match(r"The ranks are on (n\d+, ){8}\.\.\., where the launcher keeps the output\.", answer.sentence)


def test_output_of_unknown_jobs_and_ranks_is_refused(client: TestClient) -> None:
    with pytest.raises(Refused, match="404"):
        ask(client)
    for name in ("..%2F..%2Fetc", "*", "j%2F..", ".."):
        assert client.get(f"/v1/jobs/{name}/output", headers=OPERATOR).status_code == 404
    running_job(client, "n1")
    for query, reason in (("?rank=1", "has no rank 1: its last one is 0"), ("?rank=-1", "422"), ("?lines=201", "422")):
        with pytest.raises(Refused, match=reason):
            ask(client, query)


def test_output_of_a_job_that_forms_is_empty(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    agent.report(joined("j", 1.0, nodes=2))
    answer = ask(client, "?rank=0")
    assert (answer.ranks, answer.sentence) == ((), "Job j has no ranks yet.")


def test_output_is_of_the_newest_launcher_of_a_node(client: TestClient, state_dir: Path) -> None:
    running_job(client, "n1")
    keep(state_dir, "n1", {0: ["older"]}, started_at=5.0)
    keep(state_dir, "n1", {0: ["newer"]}, started_at=9.0)
    assert printed(ask(client)) == {0: ["newer"]}
    running, lock = make_output_folder(state_dir, AboutOutput(job="j", node="n1", started_at=7.0))
    assert printed(ask(client)) == {0: []}, "the launcher that runs, though it started earlier"
    (running / rank_file(0)).write_text("1.0 now\n")
    assert printed(ask(client)) == {0: ["now"]}
    os.close(lock)


def test_missing_output_is_reported_as_not_kept(client: TestClient, state_dir: Path) -> None:
    running_job(client, "n1")
    keep(state_dir, "n1", {}, keeps_ranks=False)
    answer = ask(client)
    assert (answer.ranks, answer.kept_ranks, answer.command) == ((), 0, "")
    assert answer.sentence == "No output of ranks on n1 is kept: the launcher has --no-keep-output."


def test_output_follows_no_links(client: TestClient, state_dir: Path, tmp_path: Path) -> None:
    running_job(client, "n1")
    folder = keep(state_dir, "n1", {})
    (tmp_path / "secret").write_text("1.0 secret\n")
    (folder / rank_file(0)).symlink_to(tmp_path / "secret")
    assert printed(ask(client)) == {0: []}


def test_output_has_no_control_characters(client: TestClient, state_dir: Path) -> None:
    running_job(client, "n1")
    keep(state_dir, "n1", {0: ["\x1b[31mred\x1b[0m", "\tbell\x07", "\u202eturned", "\x1b]0;title\x07"]})
    assert printed(ask(client)) == {0: ["red", "        bell\ufffd", "\ufffdturned", "\ufffd]0;title\ufffd"]}


def test_output_of_many_ranks_is_bounded(client: TestClient, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_output, "MAX_RANKS", 3)
    agent = AgentClient(client, "n1")
    agent.register()
    agent.beat(findings=())
    agent.report(joined("j", 1.0, nproc_per_node=6))
    folder = keep(state_dir, "n1", {rank: ["\t" * 8000] * 300 for rank in range(5)})
    for rank, changed_at in enumerate((50, 10, 30, 40, 20)):
        os.utime(folder / rank_file(rank), (changed_at, changed_at))
    answer = ask(client, "?lines=200")
    assert list(printed(answer)) == [0, 2, 3], "those that printed last, in order"
    assert answer.kept_ranks == 6
    size = sum(len(line.text.encode()) for rank_output in answer.ranks for line in rank_output.lines)
    assert job_output.MAX_ANSWER_BYTES / 2 < size <= job_output.MAX_ANSWER_BYTES
    assert list(printed(ask(client, "?rank=5"))) == [5], "any rank can be asked for"


def test_disk_that_hangs_stops_no_other_request(
    client: TestClient, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_job(client, "n1")
    is_over = threading.Event()
    monkeypatch.setattr(job_output, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(job_output, "kept_outputs", lambda *_: is_over.wait(60) and [])
    for _ in range(3):
        with pytest.raises(Refused, match="503 unavailable"):
            ask(client)
    assert get(client, "/v1/status", op.FleetStatus).nodes == {"healthy": 1}
    is_over.set()
    monkeypatch.undo()
    keep(state_dir, "n1", {0: ["again"]})
    assert printed(ask(client)) == {0: ["again"]}
