"""One small HTTP client: a token, an address, messages in and out, errors that say what to do."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from everstep.errors import (
    AuthenticationError,
    ConfigurationError,
    Conflict,
    EverstepError,
    MalformedMessage,
    NotFound,
    PermissionDenied,
    RateLimited,
    Unavailable,
)

T = TypeVar("T")
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 60.0
"""Seconds without a byte after which a stream counts as broken; the controller comments every 15."""

_BY_CODE: dict[str, type[EverstepError]] = {
    kind.code: kind
    for kind in (
        AuthenticationError,
        ConfigurationError,
        Conflict,
        MalformedMessage,
        NotFound,
        PermissionDenied,
        RateLimited,
        Unavailable,
    )
}


class Client:
    """Speaks to one controller.

    Args:
        url: ``http://HOST:PORT`` or https. Raises ConfigurationError for anything else.
        token: a viewer's or an operator's; empty where the certificate in ``tls`` speaks for its owner.
        tls: for https; by default the system's authorities, and no certificate of our own.
    """

    def __init__(self, url: str, token: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{url!r} is not a controller's address: use http://HOST:PORT")
        self._parts = parts
        self._url = url
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, kind: type[T], **query: str | int) -> T:
        """The answer of a GET. Raises EverstepError with what the controller said, Unavailable where none answers."""
        asked = {name: value for name, value in query.items() if value not in ("", None)}
        return self._decode(self._ask("GET", path + (f"?{urlencode(asked)}" if asked else "")), kind)

    def post(self, path: str, body: Any, kind: type[T]) -> T:
        """The answer of a POST. Raises as ``get``."""
        return self._decode(self._ask("POST", path, msgspec.json.encode(body)), kind)

    def stream(self, path: str) -> Iterator[bytes]:
        """The ``data`` of each server-sent event. Raises Unavailable when the stream breaks."""
        connection = self._connection(STREAM_TIMEOUT_S)
        try:
            response = self._send(connection, "GET", path, None)
            while line := response.readline():
                if line.startswith(b"data: "):
                    yield line[len(b"data: ") :].strip()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the stream from {self._url} broke: {error}") from error
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = str(self._parts.hostname), self._parts.port
        if self._parts.scheme == "https":
            tls = self._tls or ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = self._connection(TIMEOUT_S)
        try:
            return self._send(connection, method, path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"no answer from {self._url}: {error}") from error
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                raise Unavailable(
                    f"the certificate of {self._url} is not trusted ({error.verify_message}): give the authority that "
                    "signed it, SSL_CERT_FILE=ca.pem"
                ) from error
            raise Unavailable(
                f"no controller answers at {self._url} ({error}): is it running, and is the address right "
                "(--controller or EVERSTEP_CONTROLLER)?"
            ) from error
        if response.status >= 400:
            raise _refusal(response.status, response.read(), self._url)
        return response

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedMessage(
                f"the answer of {self._url} is not understood ({error}): is it a controller of this release?"
            ) from error


def _refusal(status: int, body: bytes, url: str) -> EverstepError:
    try:
        said = json.loads(body)
        code, message = str(said["code"]), str(said["detail"])
    except (ValueError, KeyError, TypeError):
        return EverstepError(f"{url} answered {status}, and not as a controller does: is the address right?")
    if code == "unauthenticated":
        message += "; give the right token file (--token-file or EVERSTEP_TOKEN_FILE)"
    return _BY_CODE.get(code, EverstepError)(message)


def read_token(path: str) -> str:
    """The token in a file. Raises ConfigurationError where there is none."""
    if not path:
        raise ConfigurationError(
            "no token: give --token-file or EVERSTEP_TOKEN_FILE; the controller's operator makes one with "
            "`everstep-controller token --role viewer --subject YOU --secret-file F > token`"
        )
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file {path!r} cannot be read: {error}") from error
    if not token:
        raise ConfigurationError(f"the token file {path!r} is empty")
    return token
