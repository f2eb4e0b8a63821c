from __future__ import annotations

from pathlib import Path

import pytest
from everstep_controller.api.auth import MOST_REMEMBERED, Gate
from everstep_controller.api.credentials import LOOK_EVERY_S, Credentials, Keyring
from everstep_controller.api.routes import Access
from everstep_controller.config import ControllerSettings
from everstep_controller.server.connections import Peer
from everstep_controller.store.rows import CredentialRow

from everstep.bearer_tokens import TokenRole, hash_secret, mint, stored_token
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, RateLimited

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
def credentials() -> Credentials:
    return Credentials([ROW])


@pytest.fixture
def gate(clock: ManualClock, secret_file: Path, credentials: Credentials) -> Gate:
    settings = ControllerSettings(agent_requests_per_s=4.0, request_burst_s=2.0, failed_authentications_per_s=1.0)
    return Gate.of(settings, Keyring.of_file(str(secret_file)), credentials, {}, clock, clock.wall)


@pytest.mark.promise("revocation")
def test_a_session_ends_with_what_proved_its_identity(
    gate: Gate, clock: ManualClock, secret_file: Path, credentials: Credentials
) -> None:
    minted, stored = gate.agent(bearer(mint(SECRET, TokenRole.AGENT, "n2")), "n2"), gate.agent(STORED, "n1")
    gate.again(minted)
    gate.again(stored)
    secret_file.write_bytes(b"another secret, of this year")
    clock.advance(LOOK_EVERY_S)
    with pytest.raises(AuthenticationError):
        gate.again(minted)
    gate.again(stored)
    clock.advance(2e9)
    with pytest.raises(AuthenticationError):
        gate.again(stored)


def test_a_token_that_was_verified_dies_with_its_secret(gate: Gate, clock: ManualClock, secret_file: Path) -> None:
    headers = bearer(mint(SECRET, TokenRole.VIEWER, "vera"))
    assert gate.admit(Access.READ, headers).subject == "vera"
    secret_file.write_bytes(b"another secret, of this year")
    clock.advance(LOOK_EVERY_S)
    with pytest.raises(AuthenticationError):
        gate.admit(Access.READ, headers)


def test_frames_are_counted_as_requests(gate: Gate) -> None:
    identity = gate.agent(STORED, "n1")
    for _ in range(7):
        gate.again(identity)
    with pytest.raises(RateLimited):
        gate.again(identity)


def test_right_tokens_pass_from_an_address_whose_wrong_ones_are_slowed_down(gate: Gate) -> None:
    peer = Peer("10.0.0.1")
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            gate.agent(bearer("agent:n1:wrong"), "n1", peer)
    with pytest.raises(RateLimited):
        gate.agent(bearer("agent:n1:wrong"), "n1", peer)
    assert gate.agent(STORED, "n1", peer).subject == "n1"


def test_what_is_remembered_of_tokens_is_bounded(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_controller.api.auth.MOST_REMEMBERED", 10)
    for number in range(50):
        gate.identify(bearer(mint(SECRET, TokenRole.AGENT, f"n{number}")))
        assert len(gate._known) <= 10
    for number in range(100):
        with pytest.raises((AuthenticationError, RateLimited)):
            gate.identify(bearer(f"agent:n{number}:wrong"))
    assert len(gate._known) <= 10
    assert MOST_REMEMBERED > 12_500


@pytest.mark.parametrize("token", ["x" * 100_000, "job.", "job..", "job.nobody." + "0" * 64, "es1..", "\xff" * 100])
def test_strange_tokens_are_refused(gate: Gate, token: str) -> None:
    with pytest.raises(AuthenticationError):
        gate.identify([(b"authorization", b"Bearer " + token.encode("latin-1"))])
