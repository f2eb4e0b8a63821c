"""What an agent shows of itself, and how it is renewed while the agent runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import msgspec
import pytest
from everstep_agent.config import AgentSettings
from everstep_agent.uplink.credentials import MIN_RENEWAL_INTERVAL_S, AgentCredentials

from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, ConfigurationError, Unavailable
from tests.support.certificates import Authority
from tests.support.controller_stub import ControllerStub, serving
from tests.support.uplinks import TOKEN, Bench, refuse_always, until


def settings(directory: Path, **changes: object) -> AgentSettings:
    made = AgentSettings(node="n1", controllers=("https://127.0.0.1:1",), run_dir=directory)
    return msgspec.structs.replace(made, **changes)


def asking(authority: Authority) -> ssl.SSLContext:
    """A server's side that takes nobody without a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.pair.certificate))
    context.load_cert_chain(*authority.server())
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_client_certificate_replaces_the_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.client("everstep://agent/n1")

    async def story(controller: ControllerStub) -> None:
        files = {"ca_file": authority.pair.certificate, "client_certificate": certificate, "client_key": key}
        async with Bench(tmp_path).line(controller.url, token_file=None, **files) as line:
            await until(lambda: line.node.registrations and controller.beats)

    with serving(ControllerStub("", tls=asking(authority))) as controller:
        asyncio.run(story(controller))


def test_controllers_are_verified_by_name_and_authority(tmp_path: Path) -> None:
    context = AgentCredentials(settings(tmp_path, ca_file=Authority(tmp_path).pair.certificate), ManualClock()).tls()
    assert context is not None
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


def test_the_token_is_read_for_each_connection(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def story(controller: ControllerStub) -> None:
        async with bench.line(controller.url) as line:
            await until(lambda: line.node.registrations)
            controller.token = "rotated"
            bench.token_file.write_text("rotated")
            controller.drop()
            await until(lambda: line.uplink.outcomes["session", "ok"] == 2)
            assert line.uplink.outcomes["session", "unauthenticated"] == 0

    with serving(ControllerStub(TOKEN)) as controller:
        asyncio.run(story(controller))


def test_unreadable_token_file_keeps_the_previous_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    credentials = AgentCredentials(settings(tmp_path, token_file=file), ManualClock())
    file.unlink()
    assert credentials.token() == "first"
    with pytest.raises(ConfigurationError):
        AgentCredentials(settings(tmp_path, token_file=file), ManualClock())


def test_renewed_certificate_is_used_from_the_next_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.client("everstep://agent/n1")
    given = settings(tmp_path, ca_file=authority.pair.certificate, client_certificate=certificate, client_key=key)
    credentials = AgentCredentials(given, ManualClock())
    first = credentials.tls()
    assert credentials.tls() is first
    for renewed, file in zip(authority.client("everstep://agent/n2"), (certificate, key), strict=True):
        shutil.copy(renewed, file)
    second = credentials.tls()
    assert second is not first
    certificate.write_text("half a certificate")
    assert credentials.tls() is second


def test_refused_token_is_renewed_at_a_limited_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    async def renew(given: AgentSettings, token: str) -> str:
        refused.append(token)
        return "another"

    monkeypatch.setattr("everstep_agent.uplink.credentials.renew_token", renew)
    file = tmp_path / "token"
    file.write_text("first")
    clock = ManualClock()
    credentials = AgentCredentials(settings(tmp_path, token_file=file), clock)

    async def story() -> None:
        assert await credentials.renew()
        assert not await credentials.renew()
        clock.advance(MIN_RENEWAL_INTERVAL_S)
        assert await credentials.renew()

    asyncio.run(story())
    assert refused == ["first", "first"]


def test_absent_controller_triggers_no_enrolment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[str] = []

    async def renew(given: AgentSettings, token: str) -> str:
        renewed.append(token)
        return token

    monkeypatch.setattr("everstep_agent.uplink.credentials.renew_token", renew)

    async def story(controller: ControllerStub) -> None:
        refuse_always(controller, "session", Unavailable("standing by", 0.0))
        async with Bench(tmp_path).line(controller.url) as line:
            await until(lambda: line.uplink.outcomes["session", "unavailable"] >= 2)
            assert renewed == []
            refuse_always(controller, "session", AuthenticationError("who?"))
            await until(lambda: renewed)

    with serving(ControllerStub(TOKEN)) as controller:
        asyncio.run(story(controller))


def test_failed_enrolment_keeps_the_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(given: AgentSettings, token: str) -> str:
        raise Unavailable("no controller")

    monkeypatch.setattr("everstep_agent.uplink.credentials.renew_token", away)
    assert not asyncio.run(AgentCredentials(settings(tmp_path), ManualClock()).renew())
