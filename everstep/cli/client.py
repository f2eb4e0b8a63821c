"""HTTP client for the controller: typed requests and answers, errors with advice."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from everstep.bearer_tokens import looks_like_token
from everstep.errors import BY_CODE, DECODE_ERRORS, ConfigurationError, EverstepError, MalformedMessage, Unavailable

T = TypeVar("T")
_BROKEN = (OSError, http.client.HTTPException)
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 60.0
"""Seconds without a byte after which a stream counts as broken; the controller sends a comment every 15 s."""
LEADER_RETRY_DELAYS_S = (0.2,) * 15
"""Pauses in seconds between rounds over the controllers while none leads: a lost leader is replaced within 3 s."""


class _NotLeader(Unavailable):
    """The asked controller does not lead. ``leader`` is the leader's address, as far as that controller knows."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


class ControllerClient:
    """Send requests to the leader among several controllers, and find it again when it changes.

    ``controllers`` are URLs, separated by commas; ``token`` is empty if the certificate in ``tls`` identifies the user.
    Without ``tls``, https trusts the system's authorities. Raises ConfigurationError for a malformed address.
    """

    def __init__(self, controllers: str, token: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._urls = [_checked(url.strip()) for url in controllers.split(",")]
        self._leader = self._urls[0]
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, kind: type[T], /, **query: str | int) -> T:
        """Return the answer of a GET. Raises EverstepError with the controller's message, Unavailable if none
        answers."""
        asked = {name: value for name, value in query.items() if value not in ("", None)}
        return self._decode(self._request("GET", path + (f"?{urlencode(asked)}" if asked else "")), kind)

    def post(self, path: str, body: Any, kind: type[T], *, timeout_s: float = TIMEOUT_S) -> T:
        """Return the answer of a POST. Raises as ``get``. A request that may have been accepted is not sent again."""
        return self._decode(self._request("POST", path, msgspec.json.encode(body), timeout_s), kind)

    @property
    def has_several_controllers(self) -> bool:
        """Whether more than one address was given."""
        return len(self._urls) > 1

    def post_to_all(
        self, path: str, body: Any, kind: type[T], *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, T | EverstepError]:
        """Return every given controller's answer or error by address, whether it leads or not."""
        said: dict[str, T | EverstepError] = {}
        for url in self._urls:
            try:
                connection, response = self._send(url, "POST", path, msgspec.json.encode(body), timeout_s)
                said[url] = self._decode(_read(connection, response, url), kind)
            except EverstepError as error:
                said[url] = error
        return said

    def stream(self, path: str) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the ``data`` of each server-sent event. Raises Unavailable when the stream breaks."""
        name = ""
        connection, response = self._send_to_leader("GET", path, None, STREAM_TIMEOUT_S)
        try:
            while line := response.readline():
                if line.startswith(b"event: "):
                    name = line[len(b"event: ") :].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, line[len(b"data: ") :].strip()
        except _BROKEN as error:
            raise Unavailable(f"the stream from {self._leader} broke: {error}") from error
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
        connection, response = self._send_to_leader(method, path, body, timeout_s)
        return _read(connection, response, self._leader)

    def _send_to_leader(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return the leader's answer. If only standby controllers answer, wait a little for a leader."""
        for pause_s in (*LEADER_RETRY_DELAYS_S, None):
            refused: Unavailable | None = None
            stand_by = False
            left = deque(dict.fromkeys((self._leader, *self._urls)))
            tried: set[str] = set()
            while left:
                url = left.popleft()
                tried.add(url)
                try:
                    found = self._send(url, method, path, body, timeout_s)
                except _NotLeader as error:
                    refused, stand_by = error, True
                    if error.leader not in tried and urlsplit(error.leader).scheme == urlsplit(url).scheme:
                        left.appendleft(error.leader)
                except _NoAnswer as error:
                    refused = refused or error
                else:
                    self._leader = url
                    return found
            assert refused is not None
            if not stand_by or pause_s is None:
                raise refused
            time.sleep(pause_s)
        raise AssertionError("the last pause is None")

    def _connection(self, url: str, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        host = str(parts.hostname)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)

    def _send(
        self, url: str, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return one controller's answer. Raises _NoAnswer if the controller certainly received nothing."""
        connection = self._connection(url, timeout_s)
        try:
            connection.connect()
        except _BROKEN as error:
            connection.close()
            raise _no_answer(url, error) from error
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _refusal(response.status, response.read(), url)
        except _BROKEN as error:
            connection.close()
            if method == "GET":
                raise _no_answer(url, error) from error
            raise Unavailable(
                f"the connection to {url} broke ({error}) before an answer: the order may have been accepted; check "
                "before you repeat it"
            ) from error
        except EverstepError:
            connection.close()
            raise
        return connection, response

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except DECODE_ERRORS as error:
            raise MalformedMessage(
                f"cannot decode the answer of {self._leader} ({error}): check that it is a controller of this release"
            ) from error


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, url: str) -> bytes:
    with closing(connection):
        try:
            return response.read()
        except _BROKEN as error:
            raise Unavailable(f"no answer from {url}: {error}") from error


class _NoAnswer(Unavailable):
    """No controller answers at an address."""


def _no_answer(url: str, error: Exception) -> _NoAnswer:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _NoAnswer(
            f"the certificate of {url} is not trusted ({error.verify_message}): give the authority that signed it "
            "(--ca-file or EVERSTEP_CA_FILE)"
        )
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return _NoAnswer(f"{url} does not use TLS: give an http:// address, or another port")
    return _NoAnswer(
        f"no controller answers at {url} ({error}): check that it runs, and the address "
        "(--controller or EVERSTEP_CONTROLLER)"
    )


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{url!r} is not a controller's address: use http://HOST:PORT")
    return url


def _refusal(status: int, body: bytes, url: str) -> EverstepError:
    try:
        said = json.loads(body)
        code, message = str(said["code"]), str(said["detail"])
    except (ValueError, KeyError, TypeError):
        return EverstepError(f"{url} answered status {status}, but not as a controller: check the address")
    if said.get("role") == "standby":
        return _NotLeader(message, str(said.get("leader", "")))
    if code == "unauthenticated":
        message += "; give the right token file (--token-file or EVERSTEP_TOKEN_FILE)"
    return BY_CODE.get(code, EverstepError)(message)


def path(*parts: str) -> str:
    """Return the path of a resource under ``/v1``, with its parts quoted. Names are as a person typed them: unquoted,
    ``node-1/evict?`` would be another request. Raises ConfigurationError for an empty part."""
    if not all(parts):
        raise ConfigurationError("a name is empty: check the variables of your script")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def read_token(path: str) -> str:
    """Return the token in a file. Raises ConfigurationError if there is none."""
    if not path:
        raise ConfigurationError(
            "no token: give --token-file or EVERSTEP_TOKEN_FILE; an operator of the controller makes one with "
            "`everstep-controller token --role viewer --subject YOU --secret-file F > token`"
        )
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file {path!r} cannot be read: {error}") from error
    if not token:
        raise ConfigurationError(f"the token file {path!r} is empty")
    if not looks_like_token(token):
        raise ConfigurationError(f"{path!r} does not contain a token (one word on one line): check --token-file")
    return token
