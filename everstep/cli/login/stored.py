"""Keep the logins of ``everstep login`` in a file of this user, and refresh their tokens.

A login belongs to the controllers for which it was made: its token is sent to no others. Commands that run side by side
take turns to refresh it, because providers take back a login whose refresh token is used twice.
"""

from __future__ import annotations

import fcntl
import os
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from everstep import oidc
from everstep.client.exchange import address
from everstep.errors import DECODE_ERRORS, AuthenticationError, ConfigurationError, Unavailable
from everstep.system_clock import SYSTEM_CLOCK

FILE = "logins.json"
REFRESH_BEFORE_S = 30.0
"""Seconds before its end at which a token is refreshed: a command may send it some seconds later."""
MAX_FILE_BYTES = 1 << 20


class StoredLogin(msgspec.Struct, frozen=True, kw_only=True):
    """One login."""

    controllers: tuple[str, ...]  # addresses that may get the token
    client_id: str
    provider: oidc.Provider
    id_token: str
    ends_at: float  # wall seconds of this machine
    refresh_token: str = ""


class _File(msgspec.Struct, frozen=True):
    logins: tuple[StoredLogin, ...] = ()


class LoginEnded(AuthenticationError):
    """The login cannot be refreshed."""


# ---- the file


def _read(folder: Path) -> tuple[StoredLogin, ...]:
    """Return the logins. Raises ConfigurationError for a file that others may read or have written."""
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigurationError(f"the logins in {path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise ConfigurationError(f"{path} can be read by other users: remove it, and log in again")
        try:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_File).logins
        except DECODE_ERRORS as error:
            raise ConfigurationError(f"{path} is damaged ({error}): remove it, and log in again") from error


def _write(folder: Path, logins: Sequence[StoredLogin]) -> None:
    from everstep.host.private_files import write_private

    write_private(folder / FILE, msgspec.json.encode(_File(tuple(logins))) + b"\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the file's lock, which only this user can take. Raises ConfigurationError if files cannot be written."""
    with ExitStack() as stack:
        try:
            from everstep.host.private_files import make_private_directories

            make_private_directories(folder)
            descriptor = os.open(folder / f"{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise ConfigurationError(f"logins cannot be kept in {folder}: {error}") from error


def _addresses(controllers: Sequence[str]) -> set[str]:
    return {address(url.strip()) for url in controllers}


def _find(logins: Sequence[StoredLogin], controllers: Sequence[str]) -> StoredLogin | None:
    """Return the login that was made for all these controllers."""
    wanted = _addresses(controllers)
    return next((login for login in logins if wanted <= set(login.controllers)), None)


def store(folder: Path, login: StoredLogin) -> None:
    """Keep a login, in place of others for any of its controllers. Raises ConfigurationError if it cannot be kept."""
    with _locked(folder):
        others = [stored for stored in _read(folder) if not set(stored.controllers) & set(login.controllers)]
        _write(folder, [*others, login])


def remove(folder: Path, controllers: Sequence[str]) -> list[StoredLogin]:
    """Remove the logins for any of these controllers, and return them. Raises ConfigurationError."""
    with _locked(folder):
        logins, wanted = _read(folder), _addresses(controllers)
        removed = [login for login in logins if wanted & set(login.controllers)]
        if removed:
            _write(folder, [login for login in logins if login not in removed])
    return removed


def make(controllers: Sequence[str], client_id: str, provider: oidc.Provider, tokens: oidc.TokenAnswer) -> StoredLogin:
    """Return a login from the provider's answer. Its end counts from now: this machine's clock may be wrong."""
    claims = unverified_claims(tokens.id_token)
    return StoredLogin(
        controllers=tuple(sorted(_addresses(controllers))),
        client_id=client_id,
        provider=provider,
        id_token=tokens.id_token,
        ends_at=SYSTEM_CLOCK.wall() + claims.exp - claims.iat,
        refresh_token=tokens.refresh_token,
    )


# ---- tokens


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    sub: str
    exp: float
    iat: float


def unverified_claims(token: str) -> _Claims:
    """Return claims of an ID token that came from the provider itself. Raises AuthenticationError."""
    try:
        part = token.split(".")[1]
        return msgspec.json.decode(urlsafe_b64decode(part + "=" * (-len(part) % 4)), type=_Claims)
    except (IndexError, ValueError, *DECODE_ERRORS) as error:
        raise AuthenticationError("the identity provider sent no usable ID token") from error


def current_token(folder: Path, controllers: Sequence[str], ca_file: str = "") -> str:
    """Return the token for these controllers, refreshed if need be; "" if there is no login for them.

    Raises:
        LoginEnded: The person must log in again.
        Unavailable: The provider does not answer.
        ConfigurationError: The file is unusable.
    """
    if not (folder / FILE).exists():
        return ""
    login = _find(_read(folder), controllers)
    if login is None or _is_fresh(login):
        return login.id_token if login is not None else ""
    with _locked(folder):
        logins = _read(folder)
        login = _find(logins, controllers)  # another command may have refreshed it meanwhile
        if login is None or _is_fresh(login):
            return login.id_token if login is not None else ""
        refreshed = _refresh(login, ca_file)
        _write(folder, [refreshed if stored == login else stored for stored in logins])
    return refreshed.id_token


def _is_fresh(login: StoredLogin) -> bool:
    return SYSTEM_CLOCK.wall() < login.ends_at - REFRESH_BEFORE_S


def _refresh(login: StoredLogin, ca_file: str) -> StoredLogin:
    if not login.refresh_token:
        raise LoginEnded("your login has ended: `everstep login`")
    oidc.check_installed("the refresh of your login")
    request = oidc.token_request(
        login.provider, login.client_id, "", "refresh_token", refresh_token=login.refresh_token
    )
    try:
        answer = oidc.read_answer(*send(request, ca_file), oidc.TokenAnswer, request.url)
    except oidc.Refused as error:
        raise LoginEnded(f"your login has ended ({error}): `everstep login`") from error
    if not answer.id_token:
        raise LoginEnded("the identity provider does not refresh ID tokens: `everstep login`")
    before, after = unverified_claims(login.id_token), unverified_claims(answer.id_token)
    if (before.iss, before.sub) != (after.iss, after.sub):
        raise LoginEnded("the identity provider answered with the token of another person: `everstep login`")
    kept = answer.refresh_token or login.refresh_token
    return make(login.controllers, login.client_id, login.provider, msgspec.structs.replace(answer, refresh_token=kept))


# ---- requests


def send(request: oidc.FormRequest | str, ca_file: str = "") -> tuple[int, bytes]:
    """Post a form to the provider, or get a URL. Returns status and body.

    Args:
        request: The form, or the URL.
        ca_file: Authorities that are trusted besides the system's.

    Raises:
        Unavailable: The provider does not answer.
        ConfigurationError: The authorities' file is unusable.
    """
    import ssl

    import httpx

    url = request if isinstance(request, str) else request.url
    tls = ssl.create_default_context()
    if ca_file:
        try:
            tls.load_verify_locations(ca_file)
        except OSError as error:
            raise ConfigurationError(f"the authorities in {ca_file} cannot be used: {error}") from error
    proxies = not oidc.is_loopback(url)
    body = bytearray()
    try:
        with (
            httpx.Client(verify=tls, timeout=oidc.REQUEST_TIMEOUT_S, trust_env=proxies) as client,
            client.stream(**oidc.http_arguments(request)) as response,
        ):
            for piece in response.iter_bytes():
                body += piece
                if len(body) > oidc.MAX_DOCUMENT_BYTES:
                    raise Unavailable(f"the answer at {url} is over {oidc.MAX_DOCUMENT_BYTES} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"the identity provider does not answer at {url} ({error})") from error
    return response.status_code, bytes(body)
