from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from everstep.cli import client as client_module
from everstep.cli.client import ControllerClient
from everstep.cli.main import app
from everstep.errors import ConfigurationError, Unavailable

Answer = Callable[[], tuple[int, dict[str, object]] | None]


def test_invalid_token_file_is_refused_without_showing_content(tmp_path: Path) -> None:
    for text in ("-----BEGIN KEY-----\nsecret\n", "two words", "t\u00f6ken", "\x1b[2J"):
        file = tmp_path / "token"
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="does not contain a token") as refused:
            client_module.read_token(str(file))
        assert text.strip() not in str(refused.value)


class Controllers:
    """Ports that answer as they are told, and count what they were asked. None: the connection breaks."""

    def __init__(self) -> None:
        self.servers: list[ThreadingHTTPServer] = []
        self.asked: list[str] = []

    def add(self, answer: Answer) -> str:
        """The address of one more."""
        name = f"c{len(self.servers)}"
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                asked.append(name)
                said = answer()
                if said is None:
                    self.close_connection = True
                    return
                body = json.dumps(said[1]).encode()
                self.send_response(said[0])
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def controllers() -> Iterator[Controllers]:
    made = Controllers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LEADER_RETRY_DELAYS_S", (0.0,) * 5)


def leads() -> tuple[int, dict[str, object]]:
    return 200, {"who": 1}


def stands_by(leader: str = "") -> Answer:
    refusal = {"code": "unavailable", "detail": "this controller stands by", "role": "standby", "leader": leader}
    return lambda: (503, dict(refusal))


NOBODY = "http://127.0.0.1:1"


@pytest.mark.promise("single-leader")
def test_client_finds_leader_among_several_controllers(controllers: Controllers) -> None:
    addresses = [NOBODY, controllers.add(stands_by()), controllers.add(leads)]
    client = ControllerClient(",".join(addresses), "token")
    assert client.get("/", dict) == {"who": 1}
    assert client.get("/", dict) == {"who": 1}
    assert controllers.asked == ["c0", "c1", "c1"]


def test_client_follows_leader_named_by_standby(controllers: Controllers) -> None:
    leader = controllers.add(leads)
    assert ControllerClient(controllers.add(stands_by(leader)), "token").post("/", {}, dict) == {"who": 1}
    assert controllers.asked == ["c1", "c0"]


def test_client_does_not_follow_downgrade_to_http(controllers: Controllers) -> None:
    client = ControllerClient("https://127.0.0.1:1", "token")
    with pytest.raises(Unavailable, match="no controller answers"):
        client.get("/", dict)
    plain = controllers.add(stands_by("https://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="stands by"):
        ControllerClient(plain, "token").get("/", dict)


def test_client_retries_for_a_while_without_leader(controllers: Controllers) -> None:
    answers = iter([stands_by(), stands_by(), leads])
    assert ControllerClient(controllers.add(lambda: next(answers)()), "token").get("/", dict) == {"who": 1}
    with pytest.raises(Unavailable, match="stands by"):
        ControllerClient(controllers.add(stands_by()), "token").get("/", dict)


def test_client_does_not_repeat_a_possibly_accepted_order(controllers: Controllers) -> None:
    addresses = [controllers.add(lambda: None), controllers.add(leads)]
    with pytest.raises(Unavailable, match="check before you repeat it"):
        ControllerClient(",".join(addresses), "token").post("/", {}, dict)
    assert controllers.asked == ["c0"]
    assert ControllerClient(",".join(addresses), "token").get("/", dict) == {"who": 1}


def test_client_names_first_address_when_none_answers() -> None:
    with pytest.raises(Unavailable, match=r"no controller answers at http://127\.0\.0\.1:1 "):
        ControllerClient(f"{NOBODY}, http://127.0.0.1:2", "token").get("/", dict)


# --- each of them ------------------------------------------------------------------------------------------------


def recorded(epoch: int, *left: str) -> Answer:
    """A trial's outcome: under the change these nodes would not have left while the controller led."""
    at = 3600.0 * epoch
    said = {"since": at, "events": 5, "evictions": 1, "spans": [{"begins_at": at, "ends_at": at + 3599.0}]}
    said["spans"][0]["epoch"] = epoch  # type: ignore[index]
    return lambda: (200, said | {"avoided_evictions": [f"verdict {node}-1 (evict): {node}: XID 79" for node in left]})


def try_policy(tmp_path: Path, *addresses: str) -> Result:
    token, change = tmp_path / "token", tmp_path / "change.toml"
    token.write_text("token")
    change.write_text("[policy]\neviction_count = 2\n")
    words = ["--controller", ",".join(addresses), "--token-file", str(token), "policy", "try", str(change)]
    return CliRunner().invoke(app, words, terminal_width=200)


def test_policy_try_asks_every_controller(controllers: Controllers, tmp_path: Path) -> None:
    addresses = [controllers.add(recorded(8, "n3")), controllers.add(recorded(7, "n2"))]
    done = try_policy(tmp_path, *addresses)
    assert done.exit_code == 0, done.output
    assert sorted(controllers.asked) == ["c0", "c1"]
    words = " ".join(done.output.split())
    assert "10 events decided again; it would have evicted 2 times; 2 evictions would not have been" in words
    assert words.index("verdict n2-1") < words.index("verdict n3-1")


def test_policy_try_names_unreachable_controller(controllers: Controllers, tmp_path: Path) -> None:
    done = try_policy(tmp_path, NOBODY, controllers.add(recorded(7)))
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "it would have evicted once, as happened; http://127.0.0.1:1 is not counted: no controller answers" in words


def test_policy_try_reports_missing_records(controllers: Controllers, tmp_path: Path) -> None:
    bare = lambda: (409, {"code": "conflict", "detail": "nothing is recorded here: set journal_dir"})  # noqa: E731
    done = try_policy(tmp_path, controllers.add(bare), controllers.add(bare))
    assert (done.exit_code, "set journal_dir" in done.output) == (1, True)


def test_policy_try_with_one_address_follows_the_leader(controllers: Controllers, tmp_path: Path) -> None:
    leader = controllers.add(recorded(7))
    done = try_policy(tmp_path, controllers.add(stands_by(leader)))
    assert done.exit_code == 0, done.output
    assert controllers.asked == ["c1", "c0"]


def test_client_explains_controller_without_tls(controllers: Controllers) -> None:
    plain = controllers.add(lambda: (200, {}))
    with pytest.raises(Unavailable, match="does not use TLS"):
        ControllerClient(plain.replace("http://", "https://"), "t").get("/v1/status", dict)
