"""The provider's tokens at the gate: roles by claims, names in the event log, keys that change, and bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from everstep import oidc
from everstep.bearer_tokens import LOGIN_PREFIX, Identity, TokenRole, mint_login
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, PermissionDenied, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.app.standby import StandbyApp
from everstep_controller.auth import identity_provider
from everstep_controller.auth.authenticator import Authenticator, RouteAccess
from everstep_controller.auth.credentials import CredentialStore, Keyring
from everstep_controller.auth.identity_provider import KEYS_LIFETIME_S, REFETCH_INTERVAL_S, IdentityProvider
from everstep_controller.config import ControllerSettings, OidcSettings
from tests.support.fleet.controllers import SECRET
from tests.support.services.openid_provider import CLIENT, OpenidProvider, new_key

ROLES = ("gpu-admins=operator", "staff=viewer")


class Gate:
    """An authenticator with a provider that is asked in memory."""

    def __init__(self, provider: OpenidProvider, **changes: Any) -> None:
        self.provider = provider
        self.clock = ManualClock(wall=SYSTEM_CLOCK.wall())
        self.sent: list[str] = []
        self.settings = OidcSettings(
            issuer=provider.issuer, client_id=CLIENT, roles=ROLES, audiences=("api",), **changes
        )
        self.verifier = IdentityProvider(self.settings, self.clock, self._send)
        self.gate = Authenticator(
            ControllerSettings(oidc=self.settings),
            Keyring((SECRET,)),
            CredentialStore(),
            {},
            self.clock,
            self.clock.wall,
            self.verifier,
        )

    async def _send(self, request: oidc.FormRequest | str) -> tuple[int, bytes]:
        assert isinstance(request, str)
        self.sent.append(request.removeprefix(self.provider.issuer))
        await asyncio.sleep(0)
        if self.provider.is_broken:
            return 503, b""
        document = self.provider.jwks() if request.endswith("/keys") else self.provider.metadata()
        return 200, json.dumps(document).encode()

    async def ask(self, token: str, access: RouteAccess = RouteAccess.READ) -> Identity:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        await self.gate.prepare(headers)
        return self.gate.authorize(access, headers, None)

    def __call__(self, token: str, access: RouteAccess = RouteAccess.READ) -> Identity:
        return asyncio.run(self.ask(token, access))


@pytest.fixture
def provider() -> Iterator[OpenidProvider]:
    running = OpenidProvider()
    yield running
    running._server.server_close()


@pytest.fixture
def gate(provider: OpenidProvider) -> Gate:
    return Gate(provider)


@pytest.mark.promise("roles")
def test_role_comes_from_the_claim(provider: OpenidProvider, gate: Gate) -> None:
    operator = gate(provider.token(), RouteAccess.CHANGE)
    assert operator.role is TokenRole.OPERATOR
    assert operator.subject == f"olga (00u1 at {provider.issuer})"
    viewer = gate(provider.token("api", groups=["staff"], preferred_username=None))
    assert (viewer.role, viewer.subject) == (TokenRole.VIEWER, f"00u1 at {provider.issuer}")
    with pytest.raises(PermissionDenied, match="a viewer token does not allow this"):
        gate(provider.token(groups="staff"), RouteAccess.CHANGE)
    for groups in (["others"], [], None, {"gpu-admins": 1}, "gpu-admins staff", ["gpu-admins=operator"]):
        token = provider.token(groups=groups)
        for _ in range(2):
            with pytest.raises(PermissionDenied, match=r"has no role here: .* groups"):
                gate(token)


def test_readable_name_cannot_pretend_to_be_another_person(provider: OpenidProvider, gate: Gate) -> None:
    for name in ("root (0 at https://id.example)", "a\nb", "x" * 65, "", 7, " olga"):
        assert gate(provider.token(preferred_username=name)).subject == f"00u1 at {provider.issuer}"


def test_token_ends_with_its_claim(provider: OpenidProvider, gate: Gate) -> None:
    token = provider.token()
    identity = gate(token)
    gate.clock.advance(provider.lifetime_s + 59)
    assert gate.gate.is_valid(identity)
    gate(token)
    gate.clock.advance(2)
    assert not gate.gate.is_valid(identity)
    with pytest.raises(AuthenticationError, match="has ended"):
        gate.gate.check_valid(identity)
    with pytest.raises(AuthenticationError, match="expired"):
        gate(token)


@pytest.mark.promise("roles")
def test_token_of_another_client_is_refused(provider: OpenidProvider, gate: Gate) -> None:
    with pytest.raises(AuthenticationError, match="'aud'"):
        gate(provider.token("someone else"))
    with pytest.raises(AuthenticationError, match="is not accepted"):
        gate("eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0.")


def test_new_key_is_fetched_once_it_is_used(provider: OpenidProvider, gate: Gate) -> None:
    old = provider.token()
    identity = gate(old)
    provider.keys.insert(0, new_key("k2"))
    gate.clock.advance(REFETCH_INTERVAL_S)
    assert gate(provider.token()).credential == "oidc:k2"
    assert len(gate.sent) == 4
    del provider.keys[1]
    gate.clock.advance(REFETCH_INTERVAL_S)
    gate(old)  # its key is known, and good for the rest of the hour

    async def after_an_hour() -> None:
        await gate.ask(provider.token(exp=gate.clock.wall() + 60))
        while gate.verifier._refresh is not None and not gate.verifier._refresh.done():
            await asyncio.sleep(0)

    gate.clock.advance(KEYS_LIFETIME_S)
    asyncio.run(after_an_hour())
    assert not gate.gate.is_valid(identity)
    with pytest.raises(oidc.UnknownKey):
        gate(old)


def test_withdrawn_key_is_refused_after_an_hour_without_requests(provider: OpenidProvider, gate: Gate) -> None:
    token = provider.token(exp=gate.clock.wall() + 9 * KEYS_LIFETIME_S)
    gate(token)
    provider.keys[:] = [new_key("k2")]
    gate.clock.advance(KEYS_LIFETIME_S)
    with pytest.raises(oidc.UnknownKey):
        gate(token)


def test_unknown_keys_cause_few_fetches(provider: OpenidProvider, gate: Gate) -> None:
    gate(provider.token())
    for number in range(50):
        with pytest.raises(AuthenticationError):
            gate(provider.token(header={"kid": f"x{number}"}))
    assert len(gate.sent) == 2
    gate.clock.advance(REFETCH_INTERVAL_S)
    for number in range(50):
        with pytest.raises(AuthenticationError):
            gate(provider.token(header={"kid": f"x{number}"}))
    assert len(gate.sent) == 4


def test_waiting_requests_are_bounded(provider: OpenidProvider, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_provider, "MAX_WAITING", 3)

    async def together() -> list[Any]:
        asked = (gate.ask(provider.token(jti=str(number))) for number in range(10))
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(together())
    assert sum(isinstance(answer, Identity) for answer in found) == 3
    assert sum(isinstance(answer, Unavailable) for answer in found) == 7


def test_lost_provider_leaves_known_keys_in_use(provider: OpenidProvider, gate: Gate) -> None:
    provider.is_broken = True
    with pytest.raises(Unavailable, match="status 503"):
        gate(provider.token())
    with pytest.raises(Unavailable):
        gate(provider.token())
    assert len(gate.sent) == 1
    provider.is_broken = False
    gate.clock.advance(REFETCH_INTERVAL_S)
    gate(provider.token())
    provider.is_broken = True
    gate.clock.advance(2 * KEYS_LIFETIME_S)
    for _ in range(3):
        gate(provider.token(exp=gate.clock.wall() + 60))


def test_cache_of_tokens_is_bounded(provider: OpenidProvider, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_provider, "MAX_CACHED", 5)
    for number in range(12):
        gate(provider.token(jti=str(number)))
        assert len(gate.verifier._known) <= 5


def test_login_token_ends_and_needs_a_provider(provider: OpenidProvider, gate: Gate) -> None:
    name = f"olga (00u1 at {provider.issuer})"
    token = mint_login(SECRET, TokenRole.OPERATOR, name, gate.clock.wall() + 100)
    identity = gate(token, RouteAccess.CHANGE)
    assert identity.subject == name
    assert gate.gate.is_valid(identity)
    plain = Authenticator(ControllerSettings(), Keyring((SECRET,)), CredentialStore(), {}, gate.clock, gate.clock.wall)
    for other in (token, provider.token()):
        with pytest.raises(AuthenticationError):
            plain.authenticate([(b"authorization", f"Bearer {other}".encode())])
    claims, _, mac = token[len(LOGIN_PREFIX) :].rpartition(".")
    later = mint_login(b"another secret of the fleet", TokenRole.OPERATOR, name, gate.clock.wall() + 1e9)
    for forged in (
        later,
        f"{LOGIN_PREFIX}{later[len(LOGIN_PREFIX) :].rpartition('.')[0]}.{mac}",
        f"{LOGIN_PREFIX}{claims}",
        LOGIN_PREFIX,
        f"login:{claims}:{mac}",
        token + "0",
    ):
        with pytest.raises(AuthenticationError):
            gate(forged)
    gate.clock.advance(100)
    assert not gate.gate.is_valid(identity)
    with pytest.raises(AuthenticationError, match="has ended"):
        gate(token)


def test_standby_takes_the_provider_tokens_too(provider: OpenidProvider, gate: Gate) -> None:
    """A trial of a policy asks all controllers with the person's token."""
    settings = ControllerSettings(oidc=gate.settings)
    standby = StandbyApp(settings, Keyring((SECRET,)), gate.clock, lambda: "", gate.verifier)
    client = TestClient(standby)
    for token, status in ((provider.token(), 200), (provider.token("another"), 401), (provider.token(groups=[]), 403)):
        assert client.get("/metrics", headers={"Authorization": f"Bearer {token}"}).status_code == status
