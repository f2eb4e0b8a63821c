from __future__ import annotations

from pathlib import Path

import pytest

from everstep.bearer_tokens import TokenRole, hash_secret, mint, stored_token
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, RateLimited
from everstep_controller.auth.authenticator import MAX_CACHED_TOKENS, Authenticator, RouteAccess
from everstep_controller.auth.credentials import RELOAD_INTERVAL_S, CredentialStore, Keyring
from everstep_controller.auth.peers import ConnectionPeer
from everstep_controller.config import ControllerSettings, RequestLimitSettings
from everstep_controller.store.rows import CredentialRow

SECRET = b"a secret of sixteen bytes or more"
ROW = CredentialRow(
    id="ab12", role="agent", subject="n1", hash=hash_secret("s"), created_at=0.0, created_by="olga", expires_at=2e9
)
Headers = list[tuple[bytes, bytes]]


def bearer(token: str) -> Headers:
    return [(b"host", b"x"), (b"authorization", f"Bearer {token}".encode())]


STORED = bearer(stored_token("ab12", "s"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return file


@pytest.fixture
def credentials() -> CredentialStore:
    return CredentialStore([ROW])


@pytest.fixture
def gate(clock: ManualClock, secret_file: Path, credentials: CredentialStore) -> Authenticator:
    limits = RequestLimitSettings(agent_requests_per_s=4.0, request_burst_s=2.0, failed_authentications_per_s=1.0)
    settings = ControllerSettings(request_limits=limits)
    return Authenticator(settings, Keyring.of_file(str(secret_file)), credentials, {}, clock, clock.wall)


@pytest.mark.promise("revocation")
def test_session_is_refused_after_its_credential_expires(
    gate: Authenticator, clock: ManualClock, secret_file: Path, credentials: CredentialStore
) -> None:
    minted, stored = (
        gate.authorize_agent(bearer(mint(SECRET, TokenRole.AGENT, "n2")), "n2"),
        gate.authorize_agent(STORED, "n1"),
    )
    gate.charge_frame(minted)
    gate.charge_frame(stored)
    secret_file.write_bytes(b"another secret, of this year")
    clock.advance(RELOAD_INTERVAL_S)
    with pytest.raises(AuthenticationError):
        gate.charge_frame(minted)
    gate.charge_frame(stored)
    clock.advance(2e9)
    with pytest.raises(AuthenticationError):
        gate.charge_frame(stored)


def test_verified_token_expires_when_secret_is_replaced(
    gate: Authenticator, clock: ManualClock, secret_file: Path
) -> None:
    headers = bearer(mint(SECRET, TokenRole.VIEWER, "vera"))
    assert gate.authorize(RouteAccess.READ, headers, None).subject == "vera"
    secret_file.write_bytes(b"another secret, of this year")
    clock.advance(RELOAD_INTERVAL_S)
    with pytest.raises(AuthenticationError):
        gate.authorize(RouteAccess.READ, headers, None)


def test_gate_limits_only_wrong_tokens_of_an_address(gate: Authenticator) -> None:
    peer = ConnectionPeer("10.0.0.1")
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            gate.authorize_agent(bearer("agent:n1:wrong"), "n1", peer)
    with pytest.raises(RateLimited):
        gate.authorize_agent(bearer("agent:n1:wrong"), "n1", peer)
    assert gate.authorize_agent(STORED, "n1", peer).subject == "n1"


def test_gate_bounds_its_token_cache(gate: Authenticator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_controller.auth.authenticator.MAX_CACHED_TOKENS", 10)
    for number in range(50):
        gate.authenticate(bearer(mint(SECRET, TokenRole.AGENT, f"n{number}")))
        assert len(gate._known) <= 10
    for number in range(100):
        with pytest.raises((AuthenticationError, RateLimited)):
            gate.authenticate(bearer(f"agent:n{number}:wrong"))
    assert len(gate._known) <= 10
    assert MAX_CACHED_TOKENS > 12_500
