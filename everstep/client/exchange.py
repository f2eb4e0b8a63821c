"""Build requests, read answers and find the leading controller, without network code.

``Client`` and ``AsyncClient`` share this module and add only the sending. It does not import httpx, so an agent can
use it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from everstep import __version__
from everstep.errors import BY_CODE, DECODE_ERRORS, ConfigurationError, EverstepError, MalformedMessage, Unavailable

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Page = TypeVar("Page", bound=msgspec.Struct)
Entry = TypeVar("Entry")

TIMEOUT_S = 10.0
"""Seconds for which a controller may keep a client waiting for the next bytes."""
STREAM_TIMEOUT_S = 60.0
"""Seconds without a byte after which a stream counts as broken; the controller sends a comment every 15 s."""
LEADER_ROUNDS = 16
LEADER_PAUSE_S = 0.2
"""Rounds over the controllers while none leads, and seconds between them: a lost leader is replaced within 3 s."""
PAGE_SIZE = 1000
"""Entries that are requested at once; the controller sends no more."""

QueryValue = str | int | float | bool | None


# ---- requests


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T_co]):
    """One request, and the type of its answer.

    Attributes:
        method: ``GET`` or ``POST``.
        path: Path on the controller, quoted.
        kind: Type of the answer: a message, or ``str`` for the text as it is.
        query: Query parameters; those that are empty or None are left out.
        body: Message to send as JSON, or None.
        timeout_s: Seconds for which the controller may be silent.
        accepted_statuses: Statuses from 400 whose bodies are answers of this type too.
    """

    method: str
    path: str
    kind: type[T_co]
    query: Mapping[str, QueryValue] = field(default_factory=dict)
    body: Any = None
    timeout_s: float = TIMEOUT_S
    accepted_statuses: tuple[int, ...] = ()

    @property
    def target(self) -> str:
        """The path with its query."""
        given = {name: value for name, value in self.query.items() if value is not None and value != ""}
        texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
        return self.path + (f"?{urlencode(texts)}" if texts else "")

    @property
    def content(self) -> bytes | None:
        """The encoded body."""
        return None if self.body is None else msgspec.json.encode(self.body)

    def headers(self, token: str) -> dict[str, str]:
        """Return the headers of the request, with a bearer token unless it is empty."""
        headers = {"Accept-Encoding": "identity", "User-Agent": f"everstep/{__version__}"}
        if self.body is not None:
            headers["Content-Type"] = "application/json"
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})

    def read(self, status: int, body: bytes, url: str) -> T_co:
        """Return the answer of the controller at ``url``.

        Raises:
            EverstepError: The controller refused, with its message.
            MalformedMessage: The answer is not of this type.
        """
        if status >= 400 and status not in self.accepted_statuses:
            raise refusal(status, body, url)
        try:
            return body.decode() if self.kind is str else msgspec.json.decode(body, type=self.kind)  # type: ignore[return-value]
        except DECODE_ERRORS as error:
            raise MalformedMessage(
                f"cannot decode the answer of {url} ({error}): check that it is a controller of this release"
            ) from error


def path(*parts: str) -> str:
    """Return the path of a resource under ``/v1``, with its parts quoted.

    Names are as a person typed them: unquoted, ``node-1/evict?`` would be another request. Raises ConfigurationError
    for a part that cannot be a name.
    """
    if not all(parts):
        raise ConfigurationError("a name is empty: check the variables of your script")
    for part in parts:
        if part in (".", ".."):
            raise ConfigurationError(f"{part!r} is not a name")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Page, Entry]):
    """A list that the controller sends in pages.

    Attributes:
        path: Path of the list.
        kind: Type of a page. Its first field has the entries.
        query: Filters.
        after: For lists of events: they continue after the event of this number. None for other lists.
        oldest_first: The entries of a page are oldest first, although later pages are older.
    """

    path: str
    kind: type[Page]
    query: Mapping[str, QueryValue] = field(default_factory=dict)
    after: int | None = None
    oldest_first: bool = False

    @property
    def _field(self) -> str:
        return self.kind.__struct_fields__[0]

    def entries(self, page: Page) -> tuple[Entry, ...]:
        """Return the entries of a page, in the order of the whole list."""
        found: tuple[Entry, ...] = getattr(page, self._field)
        return found[::-1] if self.oldest_first else found

    def join(self, pages: Sequence[Page]) -> Page:
        """Return the pages as one."""
        entries = [entry for page in pages for entry in self.entries(page)]
        one: dict[str, Any] = msgspec.structs.asdict(pages[-1])
        one[self._field] = tuple(entries[::-1] if self.oldest_first else entries)
        if self.after is None:
            one["next"] = ""
        return self.kind(**one)


class PageWalk(Generic[Page, Entry]):
    """Progress through a listing, up to ``limit`` entries (None: all). ``is_over`` when no page is left."""

    def __init__(self, listing: Listing[Page, Entry], limit: int | None) -> None:
        self._listing = listing
        self._remaining = sys.maxsize if limit is None else limit
        self._size = 0
        self._place: dict[str, QueryValue] = {} if listing.after is None else {"after": listing.after}
        self.is_over = False

    def next_call(self) -> Call[Page]:
        """Return the request for the next page."""
        self._size = min(self._remaining, PAGE_SIZE)
        query = {**self._listing.query, "limit": self._size, **self._place}
        return Call(method="GET", path=self._listing.path, kind=self._listing.kind, query=query)

    def take(self, page: Page) -> Page:
        """Note a page, and return it."""
        entries = self._listing.entries(page)
        self._remaining -= len(entries)
        if self._listing.after is None:
            self._place = {"cursor": page.next}  # type: ignore[attr-defined]
            is_last = not self._place["cursor"]
        else:
            is_last = len(entries) < self._size
            self._place = self._place if is_last else {"after": entries[-1].id}  # type: ignore[attr-defined]
        self.is_over = is_last or self._remaining <= 0
        return page


class EventParser:
    """Reads server-sent events from pieces of a stream, as bytes: a sentence may have any character but a newline."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield the name and ``data`` of each event that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"event: "):
                self._name = line[len(b"event: ") :].strip().decode()
            elif line.startswith(b"data: "):
                yield self._name, line[len(b"data: ") :].strip()


# ---- errors


class NotLeader(Unavailable):
    """The asked controller does not lead. ``leader`` is the leader's address, as far as that controller knows."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


class NoAnswer(Unavailable):
    """No controller answers at an address, so another one may be asked."""


def no_answer(url: str, error: BaseException) -> NoAnswer:
    """Return the error for a controller that certainly received nothing, or a query that may be repeated."""
    import ssl  # an import of its own: 15 ms that most commands can spare

    if isinstance(error, ssl.SSLCertVerificationError):
        return NoAnswer(
            f"the certificate of {url} is not trusted ({error.verify_message}): give the authority that signed it "
            "(--ca-file or EVERSTEP_CA_FILE)"
        )
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return NoAnswer(f"{url} does not use TLS: give an http:// address, or another port")
    return NoAnswer(
        f"no controller answers at {url} ({error}): check that it runs, and the address "
        "(--controller or EVERSTEP_CONTROLLER)"
    )


def broken(url: str, method: str, error: BaseException) -> Unavailable:
    """Return the error for a connection that broke before an answer. Only a query may be repeated elsewhere."""
    if method == "GET":
        return no_answer(url, error)
    return Unavailable(
        f"the connection to {url} broke ({error}) before an answer: the order may have been accepted; check "
        "before you repeat it"
    )


def refusal(status: int, body: bytes, url: str) -> EverstepError:
    """Return the error that a controller answered with."""
    try:
        said = json.loads(body)
        code, message = str(said["code"]), str(said["detail"])
    except (ValueError, KeyError, TypeError):
        return EverstepError(f"{url} answered status {status}, but not as a controller: check the address")
    if said.get("role") == "standby":
        return NotLeader(message, str(said.get("leader", "")))
    if code == "unauthenticated":
        message += "; give the right token file (--token-file or EVERSTEP_TOKEN_FILE)"
    return BY_CODE.get(code, EverstepError)(message)


# ---- controllers


def address(url: str) -> str:
    """Return ``scheme://host:port`` of a URL, without what requests do not use. Raises ConfigurationError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigurationError(f"{url!r} is not a controller's address: use http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")


class Controllers:
    """The addresses of the controllers, and which of them answered last as the leader.

    Raises ConfigurationError for a malformed address, or if there is none.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = [url.strip() for url in urls]
        for url in self.urls:
            address(url)
        if not self.urls:
            raise ConfigurationError("no controller's address is given")
        self.leader = self.urls[0]

    def search(self) -> LeaderSearch:
        """Return a round over the controllers."""
        return LeaderSearch(dict.fromkeys((self.leader, *self.urls)))


class LeaderSearch:
    """One round over the controllers: iterate over the addresses to ask, and report those that do not lead."""

    def __init__(self, urls: Mapping[str, None]) -> None:
        self._left = deque(urls)
        self._tried: set[str] = set()
        self._refused: Unavailable | None = None

    def __iter__(self) -> Iterator[str]:
        while self._left:
            url = self._left.popleft()
            self._tried.add(url)
            yield url

    def failed(self, url: str, error: Unavailable) -> None:
        """Note that the controller at ``url`` does not answer or lead. The leader that it names is asked next, unless
        that would change between http and https."""
        if isinstance(error, NotLeader):
            self._refused = error
            if error.leader not in self._tried and urlsplit(error.leader).scheme == urlsplit(url).scheme:
                self._left.appendleft(error.leader)
        else:
            self._refused = self._refused or error

    def refusal(self) -> Unavailable:
        """Return why no controller took the request: NotLeader if any of them stands by, which may end soon."""
        assert self._refused is not None
        return self._refused


def _leader_retries() -> dict[str, Any]:
    """Return the arguments of tenacity's ``Retrying`` and ``AsyncRetrying`` after a first round without a leader."""
    import tenacity

    return {
        "retry": tenacity.retry_if_exception_type(NotLeader),
        "wait": tenacity.wait_fixed(LEADER_PAUSE_S),
        "stop": tenacity.stop_after_attempt(LEADER_ROUNDS - 1),
        "reraise": True,
    }


def send_to_leader(controllers: Controllers, attempt: Callable[[str], T]) -> T:
    """Return the result of ``attempt`` at the address of the leader.

    ``attempt`` raises NotLeader or NoAnswer where the next controller should be asked. Raises Unavailable if no
    controller leads within some seconds.
    """

    def one_round() -> T:
        search = controllers.search()
        for url in search:
            try:
                found = attempt(url)
            except (NotLeader, NoAnswer) as error:
                search.failed(url, error)
            else:
                controllers.leader = url
                return found
        raise search.refusal()

    try:
        return one_round()
    except NotLeader:
        import tenacity  # an import of its own: few requests need it

        time.sleep(LEADER_PAUSE_S)
        return tenacity.Retrying(**_leader_retries())(one_round)


async def send_to_leader_async(controllers: Controllers, attempt: Callable[[str], Awaitable[T]]) -> T:
    """Do the same as ``send_to_leader`` with a coroutine."""

    async def one_round() -> T:
        search = controllers.search()
        for url in search:
            try:
                found = await attempt(url)
            except (NotLeader, NoAnswer) as error:
                search.failed(url, error)
            else:
                controllers.leader = url
                return found
        raise search.refusal()

    try:
        return await one_round()
    except NotLeader:
        import asyncio

        import tenacity

        await asyncio.sleep(LEADER_PAUSE_S)
        return await tenacity.AsyncRetrying(**_leader_retries())(one_round)
