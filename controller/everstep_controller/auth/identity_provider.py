"""Verify tokens of people's OpenID Connect provider, and map its claims to roles.

The provider's metadata and keys are fetched when a token first needs them, so a controller starts and serves its fleet
without the provider. They are fetched again every hour, and for a token of an unknown key; at most every
``REFETCH_INTERVAL_S`` seconds, whatever clients send.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from everstep import oidc
from everstep.bearer_tokens import Identity
from everstep.clock import Clock
from everstep.errors import AuthenticationError, ConfigurationError, EverstepError, PermissionDenied, Unavailable
from everstep_controller.config import OidcSettings, read_password

log = logging.getLogger(__name__)

PROVIDER_CREDENTIAL = "oidc:"
"""Begins the credential of an identity that the provider's token proves; the id of the key follows."""
KEYS_LIFETIME_S = 3600.0
"""Seconds after which keys are fetched again. A key that the provider withdraws is refused after that time, unless the
provider cannot be asked."""
REFETCH_INTERVAL_S = 10.0
"""Minimum seconds between two fetches."""
MAX_WAITING = 64
"""Maximum requests that wait for a fetch."""
MAX_CACHED = 4096
"""Maximum verified tokens in memory, about 1 KiB each."""

Send = Callable[[oidc.FormRequest | str], Awaitable[tuple[int, bytes]]]
"""Posts a form, or gets a URL. Returns status and body. Raises Unavailable."""

_READABLE_NAME = re.compile(r"[\w.@+-]+( [\w.@+-]+)*")
MAX_NAME_CHARS = 64


class IdentityProvider:
    """The provider of the settings, which name an issuer. For the event loop's thread.

    Raises ConfigurationError if a file or package that the settings need is missing.
    """

    def __init__(self, settings: OidcSettings, clock: Clock, send: Send | None = None) -> None:
        oidc.check_installed("oidc_issuer")
        self.settings = settings
        self._clock = clock
        self._send = send or _Sender(settings.ca_file)
        self._secret = read_password(settings.client_secret_file) if settings.client_secret_file else ""
        self._metadata: oidc.Provider | None = None
        self._keys: oidc.Keys | None = None
        self._failure: EverstepError | None = None
        self._stale_at = self._refetch_at = clock.monotonic()
        self._waiting = 0
        self._lock = asyncio.Lock()
        self._refresh: asyncio.Task[None] | None = None
        self._known: dict[bytes, Identity | PermissionDenied] = {}

    # --- keys

    async def prepare(self, token: str) -> None:
        """Fetch the keys if this token's is unknown. Raises Unavailable if too many requests wait for that."""
        try:
            name = oidc.key_name(token)
        except AuthenticationError:
            return  # ``verify`` says why
        await self._fetch_unless(lambda: self._keys is not None and self._keys.has(name))

    async def metadata(self) -> oidc.Provider:
        """Return the provider's metadata. Raises Unavailable."""
        await self._fetch_unless(lambda: self._metadata is not None)
        if self._metadata is None:
            raise self._no_keys()
        return self._metadata

    async def _fetch_unless(self, is_enough: Callable[[], bool]) -> None:
        """Fetch metadata and keys, unless they are enough or were fetched just now. Outdated ones stay in use while the
        provider is away, but the first request after a long time waits for the provider's answer."""
        if is_enough() and not self._is_long_ago():
            if self._clock.monotonic() >= max(self._stale_at, self._refetch_at) and not self._lock.locked():
                self._refresh = asyncio.create_task(self._fetch_alone(lambda: False), name="identity provider")
            return
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many requests wait for the identity provider: retry", REFETCH_INTERVAL_S)
        self._waiting += 1
        try:
            await self._fetch_alone(lambda: is_enough() and not self._is_long_ago())
        finally:
            self._waiting -= 1

    def _is_long_ago(self) -> bool:
        """Return whether the last attempt to fetch keys is longer ago than keys last."""
        return self._clock.monotonic() >= self._refetch_at - REFETCH_INTERVAL_S + KEYS_LIFETIME_S

    async def _fetch_alone(self, is_enough: Callable[[], bool]) -> None:
        async with self._lock:
            if is_enough() or self._clock.monotonic() < self._refetch_at:
                return
            self._refetch_at = self._clock.monotonic() + REFETCH_INTERVAL_S
            try:
                await self._fetch()
            except EverstepError as error:
                self._failure = error
                log.warning("the identity provider's keys could not be fetched: %s", error)

    async def _fetch(self) -> None:
        url = oidc.discovery_url(self.settings.issuer)
        metadata = oidc.read_provider(await self._get(url), self.settings.issuer)
        self._keys = oidc.Keys.read(await self._get(metadata.jwks_uri), metadata.jwks_uri)
        self._metadata = metadata
        self._known.clear()
        self._stale_at = self._clock.monotonic() + KEYS_LIFETIME_S

    async def _get(self, url: str) -> bytes:
        status, body = await self._send(url)
        if status != 200:
            raise Unavailable(f"the identity provider answered {url} with status {status}", REFETCH_INTERVAL_S)
        return body

    def _no_keys(self) -> Unavailable:
        why = f": {self._failure}" if self._failure is not None else ""
        return Unavailable(f"logins cannot be verified now{why}", REFETCH_INTERVAL_S)

    # --- tokens

    def verify(self, token: str) -> Identity:
        """Return the person that an ID or access token identifies.

        Raises:
            AuthenticationError: The token proves nothing.
            PermissionDenied: The person has no role.
            Unavailable: The provider's keys are unknown.
        """
        digest = hashlib.sha256(token.encode()).digest()
        known = self._known.get(digest)
        if known is None or (isinstance(known, Identity) and not self.is_valid(known)):
            self._known.pop(digest, None)
            known = self._identify(token)
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            self._known[digest] = known
        if isinstance(known, PermissionDenied):
            raise PermissionDenied(str(known))
        return known

    def is_valid(self, identity: Identity) -> bool:
        """Return whether a token's identity is still valid: it has not ended, and the provider still has its key."""
        key = identity.credential.removeprefix(PROVIDER_CREDENTIAL)
        return self._keys is not None and self._keys.has(key) and self._clock.wall() < identity.ends_at

    def _identify(self, token: str) -> Identity | PermissionDenied:
        claims = self._claims(token, self.settings.token_audiences())
        try:
            identity = self._identity(claims)
        except PermissionDenied as error:
            return error
        return Identity(
            identity.role,
            identity.subject,
            PROVIDER_CREDENTIAL + oidc.key_name(token),
            claims["exp"] + self.settings.clock_skew_s,
        )

    def _claims(self, token: str, audiences: tuple[str, ...]) -> dict[str, Any]:
        if self._keys is None:
            raise self._no_keys()
        settings = self.settings
        return oidc.verify(
            token,
            self._keys,
            issuer=settings.issuer,
            audiences=audiences,
            now=self._clock.wall(),
            skew_s=settings.clock_skew_s,
        )

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        """Return role and name of verified claims. Raises PermissionDenied without a role."""
        name = person_name(claims, self.settings)
        role = self.settings.role_of(oidc.claim_values(claims, self.settings.role_claim))
        if role is None:
            raise PermissionDenied(
                f"{name} has no role here: no value of the token's claim {self.settings.role_claim} is in oidc_roles"
            )
        return Identity(role, name)

    # --- login

    async def log_in(self, code: str, *, verifier: str, nonce: str) -> Identity:
        """Exchange the code of a login on the web page for an ID token, and return its person.

        Raises:
            AuthenticationError: The provider refused the code, or its token does not belong to this login.
            PermissionDenied: The person has no role.
            Unavailable: The provider does not answer.
        """
        metadata, settings = await self.metadata(), self.settings
        request = oidc.token_request(
            metadata,
            settings.client_id,
            self._secret,
            "authorization_code",
            code=code,
            redirect_uri=settings.redirect_uri,
            code_verifier=verifier,
        )
        answer = oidc.read_answer(*await self._send(request), oidc.TokenAnswer, request.url)
        if not answer.id_token:
            raise AuthenticationError("the identity provider sent no ID token: oidc_scopes must contain openid")
        await self.prepare(answer.id_token)
        claims = self._claims(answer.id_token, (settings.client_id,))
        oidc.check_login(
            claims,
            answer.id_token,
            nonce=nonce,
            client_id=settings.client_id,
            access_token=answer.access_token,
        )
        return self._identity(claims)


def person_name(claims: Mapping[str, Any], settings: OidcSettings) -> str:
    """Return the name of a person in the event log: subject and issuer, which identify, behind a readable name.

    No token of another kind can have such a name, because those have neither spaces nor colons.
    """
    subject = f"{claims['sub']} at {settings.issuer}"
    name = claims.get(settings.name_claim)
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or _READABLE_NAME.fullmatch(name) is None:
        return subject
    return f"{name} ({subject})" if name != claims["sub"] else subject


class _Sender:
    """Sends requests to the provider, each on a connection of its own: they are rare."""

    def __init__(self, ca_file: str) -> None:
        try:
            self._tls = ssl.create_default_context(cafile=ca_file or None)
        except OSError as error:
            raise ConfigurationError(f"oidc_ca_file {ca_file!r} cannot be used: {error}") from error

    async def __call__(self, request: oidc.FormRequest | str) -> tuple[int, bytes]:
        import httpx

        url = request if isinstance(request, str) else request.url
        proxies = not oidc.is_loopback(url)
        body = bytearray()
        try:
            async with (
                asyncio.timeout(2 * oidc.REQUEST_TIMEOUT_S),
                httpx.AsyncClient(verify=self._tls, timeout=oidc.REQUEST_TIMEOUT_S, trust_env=proxies) as client,
                client.stream(**oidc.http_arguments(request)) as response,
            ):
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > oidc.MAX_DOCUMENT_BYTES:
                        raise Unavailable(f"the answer at {url} is over {oidc.MAX_DOCUMENT_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise Unavailable(f"the identity provider does not answer at {url} ({why})", REFETCH_INTERVAL_S) from error
        return response.status_code, bytes(body)
