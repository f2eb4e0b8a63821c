from __future__ import annotations

from collections.abc import Iterator

import msgspec
from everstep_controller.server import responses
from everstep_controller.server.responses import TITLES, Problem, problem, problem_of

from everstep.errors import AuthenticationError, EverstepError, RateLimited, TooLarge, Unavailable


def kinds(kind: type[EverstepError]) -> Iterator[type[EverstepError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from kinds(child)


def test_every_error_has_title_and_error_status() -> None:
    for kind in kinds(EverstepError):
        assert kind.code in TITLES, kind.__name__
        assert 400 <= kind.status < 600, kind.__name__


def test_problem_contains_type_code_and_detail() -> None:
    said = msgspec.json.decode(problem_of(AuthenticationError("mint it again")), type=Problem)
    assert (said.type, said.status, said.code) == ("urn:everstep:error:unauthenticated", 401, "unauthenticated")
    assert said.detail == "mint it again"
    assert said.title == TITLES["unauthenticated"]


def test_unknown_code_is_its_own_title() -> None:
    assert msgspec.json.decode(problem(418, "teapot", "x"), type=Problem).title == "teapot"


def test_retry_after_is_rounded_up_to_seconds() -> None:
    assert responses.error_headers(Unavailable("away", 0.2)) == [(b"retry-after", b"1")]
    assert responses.error_headers(RateLimited("too many", 2.1)) == [(b"retry-after", b"3")]
    assert responses.error_headers(AuthenticationError("who?")) == [(b"www-authenticate", b"Bearer")]
    assert responses.error_headers(TooLarge("so much")) == [(b"connection", b"close")]
