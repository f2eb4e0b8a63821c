"""Send calls to the leader among several controllers: ``Client`` for threads, ``AsyncClient`` for asyncio.

Both have the methods of ``calls``. httpx is imported by the first request, not by the import of this module, so that
programs that only may need a client start as fast as without it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import msgspec

from everstep.client import calls, exchange
from everstep.client.exchange import Call, Controllers, Listing, PageWalk
from everstep.errors import DECODE_ERRORS, ConfigurationError, EverstepError, MalformedMessage, Unavailable
from everstep.wire.v1.operator import Event, EventGap

if TYPE_CHECKING:
    import ssl
    from typing import Self

    import httpx

P = ParamSpec("P")
T = TypeVar("T")
Page = TypeVar("Page", bound=msgspec.Struct)
Entry = TypeVar("Entry")

RECONNECT_PAUSE_S = 0.5
"""Seconds between the end of an event stream and the next attempt."""


# ---- lists


class PagedList(Generic[Page, Entry]):
    """A list of any length. Iterate over its entries; pages are requested as they are needed.

    Example::

        for node in client.nodes(state="lost"):
            print(node.node, node.reason)
        answer = client.nodes(rack="r7").collect()  # a NodeList
        print(answer.total)
    """

    def __init__(self, send: Callable[[Call[Page]], Page], listing: Listing[Page, Entry]) -> None:
        self._send = send
        self._listing = listing

    def pages(self, limit: int | None = None) -> Iterator[Page]:
        """Yield the controller's answers, with at most ``limit`` entries in all."""
        walk = PageWalk(self._listing, limit)
        while not walk.is_over:
            yield walk.take(self._send(walk.next_call()))

    def __iter__(self) -> Iterator[Entry]:
        for page in self.pages():
            yield from self._listing.entries(page)

    def collect(self, limit: int | None = None) -> Page:
        """Return the list, or its first ``limit`` entries, as one answer."""
        return self._listing.join(list(self.pages(limit)))


class AsyncPagedList(Generic[Page, Entry]):
    """A list of any length, as ``PagedList``, for ``async for``.

    Example::

        async for node in client.nodes(state="lost"):
            print(node.node, node.reason)
    """

    def __init__(self, send: Callable[[Call[Page]], Awaitable[Page]], listing: Listing[Page, Entry]) -> None:
        self._send = send
        self._listing = listing

    async def pages(self, limit: int | None = None) -> AsyncIterator[Page]:
        """Yield the controller's answers, with at most ``limit`` entries in all."""
        walk = PageWalk(self._listing, limit)
        while not walk.is_over:
            yield walk.take(await self._send(walk.next_call()))

    async def __aiter__(self) -> AsyncIterator[Entry]:
        async for page in self.pages():
            for entry in self._listing.entries(page):
                yield entry

    async def collect(self, limit: int | None = None) -> Page:
        """Return the list, or its first ``limit`` entries, as one answer."""
        return self._listing.join([page async for page in self.pages(limit)])


# ---- methods from calls


def _as_method(method: Callable[..., Any], build: Callable[..., Any]) -> Any:
    """Give a method the name, documentation and parameters of the function that builds its call."""
    made = wraps(build)(method)
    given = inspect.signature(build)
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made.__signature__ = given.replace(parameters=(me, *given.parameters.values()))  # type: ignore[attr-defined]
    return made


def _call(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(build(*args, **kwargs))

    return _as_method(method, build)  # type: ignore[no-any-return]


def _list(build: Callable[P, Listing[Page, Entry]]) -> Callable[Concatenate[Client, P], PagedList[Page, Entry]]:
    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> PagedList[Page, Entry]:
        return PagedList(self.send, build(*args, **kwargs))

    return _as_method(method, build)  # type: ignore[no-any-return]


def _async_call(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.send(build(*args, **kwargs))

    return _as_method(method, build)  # type: ignore[no-any-return]


def _async_list(
    build: Callable[P, Listing[Page, Entry]],
) -> Callable[Concatenate[AsyncClient, P], AsyncPagedList[Page, Entry]]:
    def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> AsyncPagedList[Page, Entry]:
        return AsyncPagedList(self.send, build(*args, **kwargs))

    return _as_method(method, build)  # type: ignore[no-any-return]


# ---- clients


class _Base:
    """What both clients share: addresses, credentials, and the settings of httpx."""

    def __init__(
        self,
        controllers: str | Sequence[str],
        token: str | Callable[[], str] = "",
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        urls = controllers.split(",") if isinstance(controllers, str) else controllers
        self._controllers = Controllers(urls)
        self._token = token
        self._tls = tls

    @property
    def controllers(self) -> tuple[str, ...]:
        """The given addresses."""
        return tuple(self._controllers.urls)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of an httpx client."""
        if self._tls is None:
            import ssl

            secure = any(url.startswith("https:") for url in self._controllers.urls)
            # Without https no authority is loaded, which takes 20 ms. The bare context trusts none.
            self._tls = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return {"verify": self._tls, "trust_env": False}

    def _request(self, url: str, call: Call[Any]) -> dict[str, Any]:
        """Return the arguments of an httpx request."""
        return {
            "method": call.method,
            "url": exchange.address(url) + call.target,
            "content": call.content,
            "headers": call.headers(self._token() if callable(self._token) else self._token),
            "timeout": call.timeout_s,
        }


@contextmanager
def _failures(url: str, call: Call[Any]) -> Iterator[None]:
    """Raise errors of httpx as this project's. NoAnswer: another controller may be asked."""
    import httpx

    try:
        yield
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{url!r} is not a controller's address ({error}): use http://HOST:PORT") from error
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise exchange.no_answer(url, _root(error)) from error
    except httpx.DecodingError as error:
        raise MalformedMessage(f"cannot decode the answer of {url} ({error})") from error
    except httpx.HTTPError as error:
        raise exchange.broken(url, call.method, _root(error)) from error


@contextmanager
def _stream_failures(url: str) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise Unavailable(f"the stream from {url} broke: {_root(error)}") from error


def _root(error: BaseException) -> BaseException:
    """Return the operating system's error that httpx wrapped; without one, the error of httpx."""
    found: BaseException = error
    inner = error.__cause__ or error.__context__
    while inner is not None:
        found = inner if isinstance(inner, OSError) else found
        inner = inner.__cause__ or inner.__context__
    return found if str(found) else TimeoutError("timed out")


def _stream_call(after: int | None) -> Call[str]:
    query = {"after": after}
    return Call(method="GET", path="/v1/events/stream", kind=str, query=query, timeout_s=exchange.STREAM_TIMEOUT_S)


def _decode_event(name: str, data: bytes) -> Event | EventGap:
    try:
        if name == "gap":
            return msgspec.json.decode(data, type=EventGap)
        return msgspec.json.decode(data, type=Event)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"cannot decode an event of the stream ({error})") from error


class Client(_Base):
    """Send requests to the leader among several controllers, and find it again when it changes.

    Inside ``with``, requests share connections. Without it, each request has its own, and nothing needs to be closed.
    Threads may share a client.

    Args:
        controllers: URLs of the controllers, as a sequence or separated by commas.
        token: A bearer token, or a function that returns the one for the next request, such as one that refreshes it;
            empty if the certificate in ``tls`` identifies the user.
        tls: For https. Default: trust the system's authorities.

    Every method raises the controller's refusal as an ``EverstepError`` (``NotFound``, ``Conflict``,
    ``PermissionDenied``, ...), and ``Unavailable`` if no controller answers. An order that may have been accepted is
    not sent again.

    Raises:
        ConfigurationError: An address is malformed.

    Example::

        from everstep.client import Client, read_token

        with Client("https://c1:7700,https://c2:7700", read_token("olga.token")) as client:
            for node in client.nodes(state="quarantined"):
                print(node.node, node.reason)
            client.drain("node-17", reason="replace the power supply")
    """

    _http: httpx.Client | None = None

    def __enter__(self) -> Self:
        self._http = self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def _open(self) -> httpx.Client:
        import httpx

        return httpx.Client(**self._settings())

    @contextmanager
    def _session(self) -> Iterator[httpx.Client]:
        """Yield the shared connections, or a connection for one request."""
        if self._http is not None:
            yield self._http
        else:
            with self._open() as http:
                yield http

    def send(self, call: Call[T]) -> T:
        """Send a call to the leader, and return its answer. While only standby controllers answer, wait 3 s for a
        leader."""
        with self._session() as http:
            return exchange.send_to_leader(self._controllers, lambda url: self._exchange(http, url, call))

    def send_to_all(self, call: Call[T]) -> dict[str, T | EverstepError]:
        """Return every given controller's answer or error by address, whether it leads or not."""
        said: dict[str, T | EverstepError] = {}
        with self._session() as http:
            for url in self._controllers.urls:
                try:
                    said[url] = self._exchange(http, url, call)
                except EverstepError as error:
                    said[url] = error
        return said

    def _exchange(self, http: httpx.Client, url: str, call: Call[T]) -> T:
        with _failures(url, call):
            response = http.request(**self._request(url, call))
        return call.read(response.status_code, response.content, url)

    def stream(self, after: int | None = None) -> Generator[Event | EventGap, None, None]:
        """Yield events as they happen, until the controller ends the stream.

        Args:
            after: Begin after the event of this number. Default: with the next event.

        Raises:
            Unavailable: The stream broke.
        """
        call = _stream_call(after)
        with self._session() as http:
            response = exchange.send_to_leader(self._controllers, lambda url: self._begin_stream(http, url, call))
            parser = exchange.EventParser()
            try:
                with _stream_failures(self._controllers.leader):
                    for piece in response.iter_raw():
                        for name, data in parser.feed(piece):
                            yield _decode_event(name, data)
            finally:
                response.close()

    def _begin_stream(self, http: httpx.Client, url: str, call: Call[str]) -> httpx.Response:
        with _failures(url, call):
            response = http.send(http.build_request(**self._request(url, call)), stream=True)
            if response.status_code >= 400:
                try:
                    call.read(response.status_code, response.read(), url)
                finally:
                    response.close()
            return response

    def follow(self, after: int | None = None) -> Generator[Event | EventGap, None, None]:
        """Yield events as they happen, for ever: across restarts of the controller and changes of the leader.

        Args:
            after: Begin after the event of this number. Default: with the next event.

        Example::

            for event in client.follow():
                print(event.sentence)
        """
        seen = self.status().newest_event if after is None else after
        while True:
            try:
                with closing(self.stream(seen)) as events:
                    for event in events:
                        seen = event.through if isinstance(event, EventGap) else event.id
                        yield event
            except Unavailable:
                pass  # the controller restarts; the next stream begins after the last event seen
            time.sleep(RECONNECT_PAUSE_S)

    status = _call(calls.status)
    identity = _call(calls.identity)
    budget = _call(calls.budget)
    reset_breaker = _call(calls.reset_breaker)
    metrics = _call(calls.metrics)
    health = _call(calls.health)
    ready = _call(calls.ready)
    login_options = _call(calls.login_options)
    nodes = _list(calls.nodes)
    node = _call(calls.node)
    node_gpus = _call(calls.node_gpus)
    drift = _list(calls.drift)
    evidence = _call(calls.evidence)
    drain = _call(calls.drain)
    hold = _call(calls.hold)
    release = _call(calls.release)
    readmit = _call(calls.readmit)
    evict = _call(calls.evict)
    repair = _call(calls.repair)
    forget = _call(calls.forget)
    plan_maintenance = _call(calls.plan_maintenance)
    cancel_maintenance = _call(calls.cancel_maintenance)
    jobs = _list(calls.jobs)
    job = _call(calls.job)
    progress = _call(calls.progress)
    receipt = _call(calls.receipt)
    restorability = _call(calls.restorability)
    job_checkpoints = _call(calls.job_checkpoints)
    job_output = _call(calls.job_output)
    stop_job = _call(calls.stop_job)
    resize_job = _call(calls.resize_job)
    probes = _list(calls.probes)
    probe = _call(calls.probe)
    start_probe = _call(calls.start_probe)
    events = _list(calls.events)
    newest_events = _call(calls.newest_events)
    orders = _list(calls.orders)
    newest_orders = _call(calls.newest_orders)
    generations = _list(calls.generations)
    findings = _list(calls.findings)
    verdicts = _list(calls.verdicts)
    verdict = _call(calls.verdict)
    checkpoints = _list(calls.checkpoints)
    remediations = _list(calls.remediations)
    policy = _call(calls.policy)
    check_policy = _call(calls.check_policy)
    try_policy = _call(calls.try_policy)
    credentials = _list(calls.credentials)
    credential = _call(calls.credential)
    issue_credential = _call(calls.issue_credential)
    revoke_credential = _call(calls.revoke_credential)
    rotate_credential = _call(calls.rotate_credential)
    enrol = _call(calls.enrol)


class AsyncClient(_Base):
    """``Client`` for asyncio: the same methods as coroutines, and lists for ``async for``.

    Arguments and errors are those of ``Client``. Inside ``async with``, requests share connections.

    Example::

        async with AsyncClient("https://c1:7700", token) as client:
            fleet = await client.status()
            async for event in client.follow():
                print(event.sentence)
    """

    _http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self._http = self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def _open(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(**self._settings())

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[httpx.AsyncClient]:
        """Yield the shared connections, or a connection for one request."""
        if self._http is not None:
            yield self._http
        else:
            async with self._open() as http:
                yield http

    async def send(self, call: Call[T]) -> T:
        """Send a call to the leader, and return its answer. While only standby controllers answer, wait 3 s for a
        leader."""
        async with self._session() as http:
            return await exchange.send_to_leader_async(self._controllers, lambda url: self._exchange(http, url, call))

    async def send_to_all(self, call: Call[T]) -> dict[str, T | EverstepError]:
        """Return every given controller's answer or error by address, whether it leads or not."""
        said: dict[str, T | EverstepError] = {}
        async with self._session() as http:
            for url in self._controllers.urls:
                try:
                    answer: T = await self._exchange(http, url, call)
                    said[url] = answer
                except EverstepError as error:
                    said[url] = error
        return said

    async def _exchange(self, http: httpx.AsyncClient, url: str, call: Call[T]) -> T:
        with _failures(url, call):
            response = await http.request(**self._request(url, call))
        return call.read(response.status_code, response.content, url)

    async def stream(self, after: int | None = None) -> AsyncGenerator[Event | EventGap, None]:
        """Yield events as they happen, until the controller ends the stream. Arguments and errors as in ``Client``."""
        call = _stream_call(after)
        async with self._session() as http:
            response = await exchange.send_to_leader_async(
                self._controllers, lambda url: self._begin_stream(http, url, call)
            )
            parser = exchange.EventParser()
            try:
                with _stream_failures(self._controllers.leader):
                    async for piece in response.aiter_raw():
                        for name, data in parser.feed(piece):
                            yield _decode_event(name, data)
            finally:
                await response.aclose()

    async def _begin_stream(self, http: httpx.AsyncClient, url: str, call: Call[str]) -> httpx.Response:
        with _failures(url, call):
            response = await http.send(http.build_request(**self._request(url, call)), stream=True)
            if response.status_code >= 400:
                try:
                    call.read(response.status_code, await response.aread(), url)
                finally:
                    await response.aclose()
            return response

    async def follow(self, after: int | None = None) -> AsyncGenerator[Event | EventGap, None]:
        """Yield events as they happen, for ever: across restarts of the controller and changes of the leader."""
        import asyncio

        seen = (await self.status()).newest_event if after is None else after
        while True:
            try:
                async with aclosing(self.stream(seen)) as events:
                    async for event in events:
                        seen = event.through if isinstance(event, EventGap) else event.id
                        yield event
            except Unavailable:
                pass  # the controller restarts; the next stream begins after the last event seen
            await asyncio.sleep(RECONNECT_PAUSE_S)

    status = _async_call(calls.status)
    identity = _async_call(calls.identity)
    budget = _async_call(calls.budget)
    reset_breaker = _async_call(calls.reset_breaker)
    metrics = _async_call(calls.metrics)
    health = _async_call(calls.health)
    ready = _async_call(calls.ready)
    login_options = _async_call(calls.login_options)
    nodes = _async_list(calls.nodes)
    node = _async_call(calls.node)
    node_gpus = _async_call(calls.node_gpus)
    drift = _async_list(calls.drift)
    evidence = _async_call(calls.evidence)
    drain = _async_call(calls.drain)
    hold = _async_call(calls.hold)
    release = _async_call(calls.release)
    readmit = _async_call(calls.readmit)
    evict = _async_call(calls.evict)
    repair = _async_call(calls.repair)
    forget = _async_call(calls.forget)
    plan_maintenance = _async_call(calls.plan_maintenance)
    cancel_maintenance = _async_call(calls.cancel_maintenance)
    jobs = _async_list(calls.jobs)
    job = _async_call(calls.job)
    progress = _async_call(calls.progress)
    receipt = _async_call(calls.receipt)
    restorability = _async_call(calls.restorability)
    job_checkpoints = _async_call(calls.job_checkpoints)
    job_output = _async_call(calls.job_output)
    stop_job = _async_call(calls.stop_job)
    resize_job = _async_call(calls.resize_job)
    probes = _async_list(calls.probes)
    probe = _async_call(calls.probe)
    start_probe = _async_call(calls.start_probe)
    events = _async_list(calls.events)
    newest_events = _async_call(calls.newest_events)
    orders = _async_list(calls.orders)
    newest_orders = _async_call(calls.newest_orders)
    generations = _async_list(calls.generations)
    findings = _async_list(calls.findings)
    verdicts = _async_list(calls.verdicts)
    verdict = _async_call(calls.verdict)
    checkpoints = _async_list(calls.checkpoints)
    remediations = _async_list(calls.remediations)
    policy = _async_call(calls.policy)
    check_policy = _async_call(calls.check_policy)
    try_policy = _async_call(calls.try_policy)
    credentials = _async_list(calls.credentials)
    credential = _async_call(calls.credential)
    issue_credential = _async_call(calls.issue_credential)
    revoke_credential = _async_call(calls.revoke_credential)
    rotate_credential = _async_call(calls.rotate_credential)
    enrol = _async_call(calls.enrol)
