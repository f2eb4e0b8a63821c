"""Somebody's URL that remedies or alerts are sent to: one exchange, one connection."""

from __future__ import annotations

import http.client
from urllib.parse import urlencode, urlsplit

from controller.config import is_http_url
from everstep.errors import ConfigurationError, Unavailable

TIMEOUT_S = 5.0
LARGEST_ANSWER_BYTES = 1 << 20


class Receiver:
    """Belongs to whoever asks; one thread at a time.

    Args:
        url: http or https. Raises ConfigurationError for anything else.
        what: what is expected there, for messages: "a webhook".
    """

    def __init__(self, url: str, what: str) -> None:
        if not is_http_url(url):
            raise ConfigurationError(f"{url!r} cannot be {what}: use http://HOST/PATH or https://HOST/PATH")
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self._what = what
        self._parts = parts

    def ask(
        self, method: str, headers: dict[str, str], body: bytes = b"", query: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and beginning of the answer. Raises Unavailable where there is none."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self._parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._path(query or {}), body or None, headers)
            response = connection.getresponse()
            return response.status, response.read(LARGEST_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._what} at {self.host}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _path(self, query: dict[str, str]) -> str:
        asked = "&".join(filter(None, (self._parts.query, urlencode(query))))
        return (self._parts.path or "/") + (f"?{asked}" if asked else "")
