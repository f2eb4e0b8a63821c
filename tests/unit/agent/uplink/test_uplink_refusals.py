"""Refusals over HTTP and in frames, told apart by code and status."""

from __future__ import annotations

import pytest
from everstep_agent.uplink.connection import (
    MAX_RETRY_AFTER_BUSY_S,
    MAX_RETRY_AFTER_S,
    error_from_frame,
    error_from_response,
    retry_after_s,
)

from everstep.errors import (
    AuthenticationError,
    Conflict,
    EverstepError,
    NotFound,
    ProtocolError,
    RateLimited,
    StaleGeneration,
    Unavailable,
)
from everstep.wire.v1.agent import FrameKind, FrameRefused

URL = "http://c:1"
PROBLEM = b'{"type":"urn:everstep:error:conflict","title":"Conflict","status":409,"code":"conflict","detail":"why"}'


def test_refusal_is_parsed() -> None:
    error = error_from_response(409, PROBLEM, "", URL)
    assert isinstance(error, Conflict)
    assert str(error) == "http://c:1: why (409)"


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", b"[]", b'{"code":7}', b'{"x":' + b"[" * 100_000])
@pytest.mark.parametrize(
    ("status", "kind"), [(401, AuthenticationError), (404, NotFound), (409, StaleGeneration), (400, ProtocolError)]
)
def test_unknown_refusal_body_is_classified_by_status(body: bytes, status: int, kind: type[EverstepError]) -> None:
    assert type(error_from_response(status, body, "", URL)) is kind


@pytest.mark.parametrize("status", [500, 502, 503, 599])
def test_controller_error_is_unavailable_and_no_refusal(status: int) -> None:
    assert type(error_from_response(status, PROBLEM, "", URL)) is Unavailable


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("", 0.0), ("Fri, 31 Dec", 0.0), ("9999999", 5.0)])
def test_retry_after_is_honoured_up_to_a_limit(header: str, seconds: float) -> None:
    assert retry_after_s(error_from_response(503, b"", header, URL), is_busy=False) == seconds
    assert retry_after_s(error_from_response(503, b"", header, URL), is_busy=True) == min(
        seconds, MAX_RETRY_AFTER_BUSY_S
    )


def test_frame_refusal_is_classified_by_its_code() -> None:
    limited = error_from_frame(
        FrameRefused(frame_kind=FrameKind.REPORTS, code="rate_limited", message="slower", retry_after_s=1e9), URL
    )
    assert isinstance(limited, RateLimited)
    assert retry_after_s(limited, is_busy=False) == MAX_RETRY_AFTER_S
    assert type(error_from_frame(FrameRefused(frame_kind=2, code="unavailable", message="m"), URL)) is Unavailable
    assert type(error_from_frame(FrameRefused(frame_kind=2, code="from_the_future", message="m"), URL)) is ProtocolError


@pytest.mark.parametrize("after_s", [-1.0, float("nan"), float("inf")])
def test_invalid_retry_after_never_blocks_an_agent(after_s: float) -> None:
    assert retry_after_s(Unavailable("away", after_s), is_busy=False) == 0.0
