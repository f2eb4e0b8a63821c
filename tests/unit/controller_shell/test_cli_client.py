from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from everstep.cli import client as client_module
from everstep.cli.client import Client
from everstep.errors import Unavailable

Answer = Callable[[], tuple[int, dict[str, object]] | None]


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
    monkeypatch.setattr(client_module, "PAUSES_S", (0.0,) * 5)


def leads() -> tuple[int, dict[str, object]]:
    return 200, {"who": 1}


def stands_by(leader: str = "") -> Answer:
    refusal = {"code": "unavailable", "detail": "this controller stands by", "role": "standby", "leader": leader}
    return lambda: (503, dict(refusal))


NOBODY = "http://127.0.0.1:1"


def test_the_leader_is_found_among_controllers_that_are_away_or_stand_by(controllers: Controllers) -> None:
    addresses = [NOBODY, controllers.add(stands_by()), controllers.add(leads)]
    client = Client(",".join(addresses), "token")
    assert client.get("/", dict) == {"who": 1}
    assert client.get("/", dict) == {"who": 1}
    assert controllers.asked == ["c0", "c1", "c1"]


def test_a_standbys_word_for_who_leads_is_followed(controllers: Controllers) -> None:
    leader = controllers.add(leads)
    assert Client(controllers.add(stands_by(leader)), "token").post("/", {}, dict) == {"who": 1}
    assert controllers.asked == ["c1", "c0"]


def test_a_standbys_word_never_leads_to_plain_text(controllers: Controllers) -> None:
    client = Client("https://127.0.0.1:1", "token")
    with pytest.raises(Unavailable, match="no controller answers"):
        client.get("/", dict)
    plain = controllers.add(stands_by("https://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="stands by"):
        Client(plain, "token").get("/", dict)


def test_while_nobody_leads_it_asks_again_for_a_while(controllers: Controllers) -> None:
    answers = iter([stands_by(), stands_by(), leads])
    assert Client(controllers.add(lambda: next(answers)()), "token").get("/", dict) == {"who": 1}
    with pytest.raises(Unavailable, match="stands by"):
        Client(controllers.add(stands_by()), "token").get("/", dict)


def test_an_order_that_may_have_been_taken_is_not_given_twice(controllers: Controllers) -> None:
    addresses = [controllers.add(lambda: None), controllers.add(leads)]
    with pytest.raises(Unavailable, match="look before you give it again"):
        Client(",".join(addresses), "token").post("/", {}, dict)
    assert controllers.asked == ["c0"]
    assert Client(",".join(addresses), "token").get("/", dict) == {"who": 1}


def test_where_nobody_answers_the_first_address_is_named() -> None:
    with pytest.raises(Unavailable, match=r"no controller answers at http://127\.0\.0\.1:1 "):
        Client(f"{NOBODY}, http://127.0.0.1:2", "token").get("/", dict)
