"""Both clients find the leader, repeat requests that are safe to repeat, and explain a missing answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.client import AsyncClient, Call, Client, exchange, read_token
from everstep.errors import ConfigurationError, EverstepError, MalformedMessage, PermissionDenied, Unavailable
from tests.support.fleet.fake_controllers import UNREACHABLE, FakeControllers, leader_answer, standby_answer

QUERY: Call[dict[str, int]] = Call(method="GET", path="/", kind=dict)
ORDER: Call[dict[str, int]] = Call(method="POST", path="/", kind=dict, body={})
LEADER = {"who": 1}

Send = Callable[[Call[Any]], Any]


def blocking(addresses: str, **more: Any) -> Send:
    return Client(addresses, "token", **more).send


def concurrent(addresses: str, **more: Any) -> Send:
    client = AsyncClient(addresses, "token", **more)
    return lambda call: asyncio.run(client.send(call))


@pytest.fixture
def controllers() -> Iterator[FakeControllers]:
    made = FakeControllers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LEADER_PAUSE_S", 0.0)


@pytest.fixture(params=[blocking, concurrent])
def client(request: pytest.FixtureRequest) -> Callable[..., Send]:
    made: Callable[..., Send] = request.param
    return made


@pytest.mark.promise("single-leader")
def test_client_finds_leader_among_several_controllers(
    client: Callable[..., Send], controllers: FakeControllers
) -> None:
    send = client(",".join([UNREACHABLE, controllers.add(standby_answer()), controllers.add(leader_answer)]))
    assert send(QUERY) == LEADER
    assert send(QUERY) == LEADER
    assert controllers.requests == ["c0", "c1", "c1"]


def test_client_follows_leader_named_by_standby(client: Callable[..., Send], controllers: FakeControllers) -> None:
    leader = controllers.add(leader_answer)
    assert client(controllers.add(standby_answer(leader)))(ORDER) == LEADER
    assert controllers.requests == ["c1", "c0"]


@pytest.mark.parametrize(("first", "named"), [("https://a:1", "http://b:1"), ("http://a:1", "https://b:1")])
def test_named_leader_with_another_scheme_is_not_asked(first: str, named: str) -> None:
    search, asked = exchange.LeaderSearch({first: None}), []
    for url in search:
        asked.append(url)
        search.failed(url, exchange.NotLeader("stands by", named))
    assert asked == [first]


def test_client_retries_for_a_while_without_leader(client: Callable[..., Send], controllers: FakeControllers) -> None:
    answers = iter([standby_answer(), standby_answer(), leader_answer])
    assert client(controllers.add(lambda: next(answers)()))(QUERY) == LEADER
    with pytest.raises(Unavailable, match="stands by"):
        client(controllers.add(standby_answer()))(QUERY)
    assert controllers.requests.count("c1") == exchange.LEADER_ROUNDS


def test_client_does_not_repeat_a_possibly_accepted_order(
    client: Callable[..., Send], controllers: FakeControllers
) -> None:
    addresses = ",".join([controllers.add(lambda: None), controllers.add(leader_answer)])
    with pytest.raises(Unavailable, match="check before you repeat it"):
        client(addresses)(ORDER)
    assert controllers.requests == ["c0"]
    assert client(addresses)(QUERY) == LEADER


def test_client_explains_controller_without_tls(client: Callable[..., Send], controllers: FakeControllers) -> None:
    plain = controllers.add(leader_answer)
    with pytest.raises(Unavailable, match="does not use TLS"):
        client(plain.replace("http://", "https://"), tls=ssl.create_default_context())(QUERY)


def test_refusal_is_raised_as_its_class(client: Callable[..., Send], controllers: FakeControllers) -> None:
    refused = controllers.add(lambda: (403, {"code": "forbidden", "detail": "viewers may not"}))
    with pytest.raises(PermissionDenied, match="viewers may not"):
        client(refused)(ORDER)
    with pytest.raises(EverstepError, match="but not as a controller"):
        client(controllers.add(lambda: (502, {"message": "bad gateway"})))(QUERY)


def test_answer_of_another_program_is_refused(client: Callable[..., Send], controllers: FakeControllers) -> None:
    number: Call[int] = Call(method="GET", path="/", kind=int)
    with pytest.raises(MalformedMessage, match="check that it is a controller of this release"):
        client(controllers.add(leader_answer))(number)


def test_call_to_all_reports_each_controller(controllers: FakeControllers) -> None:
    addresses = [controllers.add(leader_answer), UNREACHABLE]
    answers = Client(addresses, "token").send_to_all(ORDER)
    assert answers == asyncio.run(AsyncClient(addresses).send_to_all(ORDER)) | {UNREACHABLE: answers[UNREACHABLE]}
    assert answers[addresses[0]] == LEADER
    assert isinstance(answers[UNREACHABLE], Unavailable)


def test_proxy_settings_are_ignored(
    client: Callable[..., Send], controllers: FakeControllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", UNREACHABLE)
    assert client(controllers.add(leader_answer))(QUERY) == LEADER


@pytest.mark.parametrize("address", ["controller:7700", "ftp://c:1", "http://", "http://c:port", "http://c:99999", ""])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a controller's address"):
        Client(address, "token")


def test_host_that_no_url_may_have_is_refused(client: Callable[..., Send]) -> None:
    with pytest.raises(ConfigurationError, match="is not a controller's address"):
        client("http://\u2603..c:1")(QUERY)


def test_invalid_token_file_is_refused_without_showing_content(tmp_path: Path) -> None:
    for text in ("-----BEGIN KEY-----\nsecret\n", "two words", "t\u00f6ken", "\x1b[2J"):
        file = tmp_path / "token"
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="does not contain a token") as refused:
            read_token(str(file))
        assert text.strip() not in str(refused.value)
