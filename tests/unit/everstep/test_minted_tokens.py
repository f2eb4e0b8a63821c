from __future__ import annotations

from pathlib import Path

import pytest

from everstep.bearer_tokens import (
    TokenRole,
    mint,
    verify_with_secret,
)
from everstep.clock import ManualClock
from everstep.errors import AuthenticationError, ConfigurationError
from everstep_controller.auth.credentials import RELOAD_INTERVAL_S, Keyring, fingerprint
from everstep_controller.config import read_secrets

OLD, NEW = b"the secret of last year", b"the secret of this year"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    rewrite(file, OLD)
    return file


def rewrite(file: Path, *lines: bytes) -> None:
    """Replace the file by a rename, as operators should."""
    draft = file.with_suffix(".new")
    draft.write_bytes(b"\n".join(lines) + b"\n")
    draft.chmod(0o600)
    draft.rename(file)


def test_minted_token_contains_role_and_subject() -> None:
    token = mint(OLD, TokenRole.AGENT, "n1")
    identity, _ = verify_with_secret((OLD,), token)
    assert (identity.role, identity.subject) == (TokenRole.AGENT, "n1")


@pytest.mark.parametrize("role", [TokenRole.JOIN, TokenRole.TRAINER])
def test_join_and_trainer_tokens_are_not_minted(role: TokenRole) -> None:
    with pytest.raises(ValueError, match="not minted"):
        mint(OLD, role, "n1")


@pytest.mark.parametrize(
    "token",
    ["", "agent", "agent:n1", "agent:n1:", "viewer:n1:{mac}", "agent:n2:{mac}", "agent::{mac}", "agent:n1:{mac}0", "é"],
)
def test_altered_token_does_not_verify(token: str) -> None:
    mac = mint(OLD, TokenRole.AGENT, "n1").rpartition(":")[2]
    with pytest.raises(AuthenticationError):
        verify_with_secret((OLD,), token.format(mac=mac))


def test_secret_file_holds_several_secrets_but_no_short_one(secret_file: Path) -> None:
    rewrite(secret_file, NEW, b"", OLD)
    assert read_secrets(str(secret_file)) == (NEW, OLD)
    rewrite(secret_file, NEW, b"short")
    with pytest.raises(ConfigurationError, match="has 5 bytes"):
        read_secrets(str(secret_file))


def test_secrets_rotate_without_restart(secret_file: Path) -> None:
    clock, keyring = ManualClock(), Keyring.of_file(str(secret_file))
    old, new = mint(OLD, TokenRole.VIEWER, "vera"), mint(NEW, TokenRole.VIEWER, "vera")
    assert keyring.refresh(clock) == 0
    rewrite(secret_file, NEW, OLD)
    clock.advance(RELOAD_INTERVAL_S)
    assert keyring.refresh(clock) == 1
    assert [keyring.verify(token).credential for token in (new, old)] == [fingerprint(NEW), fingerprint(OLD)]
    rewrite(secret_file, NEW)
    clock.advance(RELOAD_INTERVAL_S)
    assert keyring.refresh(clock) == 2
    assert keyring.names == {fingerprint(NEW)}
    with pytest.raises(AuthenticationError):
        keyring.verify(old)


@pytest.mark.parametrize("damage", ["gone", "open to all", "empty"])
def test_damaged_secret_file_keeps_previous_secrets(
    secret_file: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, keyring = ManualClock(), Keyring.of_file(str(secret_file))
    token = mint(OLD, TokenRole.VIEWER, "vera")
    if damage == "gone":
        secret_file.unlink()
    elif damage == "empty":
        rewrite(secret_file, b"")
    else:
        rewrite(secret_file, NEW)
        secret_file.chmod(0o644)
    clock.advance(RELOAD_INTERVAL_S)
    assert keyring.refresh(clock) == 0
    assert keyring.verify(token).subject == "vera"
    assert "stay unchanged" in caplog.text
    rewrite(secret_file, NEW)
    clock.advance(RELOAD_INTERVAL_S)
    assert keyring.refresh(clock) == 1
