"""Tokens and certificates of an agent, and their renewal while the agent runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep.errors import ConfigurationError, Unavailable
from everstep_agent.config import AgentSettings
from everstep_agent.uplink.credentials import MIN_RENEWAL_INTERVAL_S, AgentCredentials
from tests.support.agents.controller_stub import ControllerStub, serving
from tests.support.agents.uplinks import UplinkBench, until
from tests.support.services.certificates import Authority


def settings(directory: Path, **changes: object) -> AgentSettings:
    return AgentSettings.from_values(node="n1", controllers=("https://127.0.0.1:1",), run_dir=directory, **changes)


def requiring_certificate(authority: Authority) -> ssl.SSLContext:
    """The TLS context of a server that requires a client certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.pair.certificate))
    context.load_cert_chain(*authority.server())
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_client_certificate_replaces_the_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.client("everstep://agent/n1")

    async def story(controller: ControllerStub) -> None:
        async with UplinkBench(tmp_path).running_uplink(
            controller.url,
            token_file=None,
            ca_file=authority.pair.certificate,
            client_certificate=certificate,
            client_key=key,
        ) as line:
            await until(lambda: line.node.registrations and controller.heartbeats)

    with serving(ControllerStub("", tls=requiring_certificate(authority))) as controller:
        asyncio.run(story(controller))


def test_controllers_are_verified_by_name_and_authority(tmp_path: Path) -> None:
    context = AgentCredentials(settings(tmp_path, ca_file=Authority(tmp_path).pair.certificate), ManualClock()).tls()
    assert context is not None
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


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
    agent_settings = settings(
        tmp_path, ca_file=authority.pair.certificate, client_certificate=certificate, client_key=key
    )
    credentials = AgentCredentials(agent_settings, ManualClock())
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

    async def renew(agent_settings: AgentSettings, token: str) -> str:
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


def test_failed_enrolment_keeps_the_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(agent_settings: AgentSettings, token: str) -> str:
        raise Unavailable("no controller")

    monkeypatch.setattr("everstep_agent.uplink.credentials.renew_token", away)
    assert not asyncio.run(AgentCredentials(settings(tmp_path), ManualClock()).renew())
