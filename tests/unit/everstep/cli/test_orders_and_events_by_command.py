"""Commands turn arguments into requests and print answers safely, against servers that record requests."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner, Result

from everstep.cli import context, events
from everstep.cli.events import parse_time
from everstep.cli.main import app
from everstep.client.exchange import path
from everstep.errors import ConfigurationError
from everstep.system_clock import SYSTEM_CLOCK, SystemClock
from everstep.wire.v1 import operator as op

EVENTS = [{"id": n, "at": 1795400000.0 + n, "kind": "x", "sentence": f"said {n}", "trace": "t"} for n in range(1, 2301)]


class Controller:
    """Takes every order but those to node ``n9``; has 2300 events, the newest of them 5000 by its own account."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(("GET", self.path))
                place = urlsplit(self.path)
                wanted = {name: values[0] for name, values in parse_qs(place.query).items()}
                if place.path == "/v1/status":
                    self._say(200, {"version": "1", "epoch": 1, "now": 1.0, "started_at": 1.0, "nodes": {}, "jobs": [],
                                    "newest_event": 5000})  # fmt: skip
                elif place.path == "/v1/events/stream":
                    self._say(403, {"code": "forbidden", "detail": "enough"})
                elif "node" in wanted:
                    self._say(200, {"events": [], "next_after": 0})
                else:
                    fit = [event for event in EVENTS if int(str(event["id"])) > int(wanted.get("after", 0))]
                    limit = int(wanted["limit"])
                    self._say(200, {"events": fit[-limit:] if "newest" in wanted else fit[:limit], "next_after": 0})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                asked.append(("POST", self.path))
                if "/n9/" in self.path:
                    self._say(404, {"code": "not_found", "detail": "no node n9"})
                else:
                    self._say(200, {"trace": "t", "sentence": "olga ordered it"})

            def _say(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def run(self, token: Path, *arguments: str) -> Result:
        token.write_text("t")
        return CliRunner().invoke(app, ["--controller", self.url, "--token-file", str(token), *arguments])


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_name_is_escaped_as_one_path_segment(controller: Controller, tmp_path: Path) -> None:
    controller.run(tmp_path / "t", "node", "hold", "n1/evict?", "--reason", "x")
    controller.run(tmp_path / "t", "job", "resize", "j/stop?", "2", "--reason", "x")
    assert controller.asked == [("POST", "/v1/nodes/n1%2Fevict%3F/hold"), ("POST", "/v1/jobs/j%2Fstop%3F/resize")]


def test_empty_name_is_refused_without_request(controller: Controller, tmp_path: Path) -> None:
    for order in (("node", "evict", ""), ("node", "show", ""), ("job", "stop", "")):
        reason = () if "show" in order else ("--reason", "x")
        result = controller.run(tmp_path / "t", *order, *reason)
        assert (result.exit_code, "a name is empty" in result.output) == (2, True)
    assert controller.asked == []
    with pytest.raises(ConfigurationError):
        path("nodes", "")


def test_order_reaches_all_nodes_despite_a_refusal(controller: Controller, tmp_path: Path) -> None:
    result = controller.run(tmp_path / "t", "node", "drain", "n1", "n9", "n2", "n1", "--reason", "rack moves")
    assert [asked[1] for asked in controller.asked] == [f"/v1/nodes/{node}/drain" for node in ("n1", "n9", "n2")]
    assert (result.exit_code, result.output.count("olga ordered it"), "no node n9" in result.output) == (1, 2, True)


def test_blank_reason_is_refused_without_request(controller: Controller, tmp_path: Path) -> None:
    assert controller.run(tmp_path / "t", "node", "hold", "n1", "--reason", " ").exit_code == 2
    assert controller.asked == []


def test_events_of_long_trace_are_read_completely(controller: Controller, tmp_path: Path) -> None:
    result = controller.run(tmp_path / "t", "events", "--trace", "t", "--json")
    assert len(result.output.splitlines()) == len(EVENTS)


def test_events_limit_may_exceed_a_page(controller: Controller, tmp_path: Path) -> None:
    result = controller.run(tmp_path / "t", "events", "--limit", "1500", "--json")
    assert [json.loads(line)["id"] for line in result.output.splitlines()] == list(range(801, 2301))


def test_events_follow_starts_at_newest_event_without_matches(controller: Controller, tmp_path: Path) -> None:
    controller.run(tmp_path / "t", "events", "--follow", "--node", "n7")
    assert controller.asked[-1] == ("GET", "/v1/events/stream?after=5000")


def test_orders_are_filtered_by_time(controller: Controller, tmp_path: Path) -> None:
    result = controller.run(tmp_path / "t", "orders", "--since", "2h", "--until", "2026-11-20T12:00+00:00")
    assert result.exit_code == 0, result.output
    asked = urlsplit(controller.asked[0][1])
    assert (asked.path, parse_qs(asked.query)["until"]) == ("/v1/orders", ["1795176000.0"])


def test_times_are_relative_or_iso() -> None:
    assert abs(SYSTEM_CLOCK.wall() - 5400 - parse_time("1.5h")) < 60
    assert parse_time("2026-11-20T12:00+01:00") == 1795172400.0
    for text in ("soon", "2 hours", "-2h", ""):
        with pytest.raises(ConfigurationError, match="is no time"):
            parse_time(text)


def test_printer_replaces_terminal_control_characters() -> None:
    out = io.StringIO()
    printer = context.Printer(file=out, force_terminal=True, width=80)
    printer.print(Text("GPU \x1b]0;owned\x07\x9b2J\u202e", style="red"))
    assert out.getvalue().startswith("\x1b[31mGPU \ufffd]0;owned")
    assert not set("\x9b\u202e\x07") & set(out.getvalue())


def test_json_output_has_no_raw_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    event = op.Event(id=1, at=1.0, kind="x", sentence="\x9b2J\u202eGPU \x1b[2J", trace="t")
    context.show(event, True, "")
    events._print(event, True)
    shown = capsys.readouterr().out
    assert not set("\x9b\u202e\x1b") & set(shown)
    assert shown.count("\\u009b2J\\u202eGPU \\u001b[2J") == 2


def test_budget_shows_time_until_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from everstep.cli import history
    from everstep.wire.v1 import operator_history

    scope = operator_history.BudgetScope(
        kind="fleet", name="", limit=1, used=1, remaining=0, nodes=6, next_free_at=1300.0
    )

    class Told:
        def budget(self) -> operator_history.BudgetStatus:
            return operator_history.BudgetStatus(window_s=300.0, scopes=(scope,))

    drawn: list[Any] = []
    monkeypatch.setattr(history, "connected_client", lambda _: _Given(Told()))
    monkeypatch.setattr(SystemClock, "wall", lambda _: 1000.0)
    monkeypatch.setattr(history, "show", lambda _message, _as_json, view: drawn.append(view))
    history.budget(typer.Context(typer.main.get_command(app)))
    assert list(drawn[0].columns[-1].cells) == ["5 min"]


def test_budget_shows_no_time_while_breaker_is_tripped(monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.cli import history
    from everstep.wire.v1 import operator_history

    scope = operator_history.BudgetScope(kind="fleet", name="", limit=1, used=1, remaining=0, nodes=6)

    class Told:
        def budget(self) -> operator_history.BudgetStatus:
            return operator_history.BudgetStatus(window_s=300.0, breaker="the budget is used up", scopes=(scope,))

    drawn: list[Any] = []
    monkeypatch.setattr(history, "connected_client", lambda _: _Given(Told()))
    monkeypatch.setattr(history, "show", lambda _message, _as_json, view: drawn.append(view))
    history.budget(typer.Context(typer.main.get_command(app)))
    assert list(drawn[0].columns[-1].cells) == ["after everstep reset-breaker"]


class _Given:
    def __init__(self, given: Any) -> None:
        self._given = given

    def __enter__(self) -> Any:
        return self._given

    def __exit__(self, *_: object) -> None:
        pass
