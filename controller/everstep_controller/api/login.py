"""Log people in on the web page, by OpenID Connect's authorization code flow with PKCE.

The controller keeps nothing of a login in progress. Its cookie holds a random id, an end and a MAC. State, nonce and
PKCE verifier are MACs of that id under the fleet's secret, so any controller of the fleet can finish the login, and
only in the browser that began it. At the end the page gets a token in the fragment of its address, which browsers do
not send, and uses it as any other token: no request is authorized by a cookie.
"""

from __future__ import annotations

import hmac
import html
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from fastapi import FastAPI, Request, Response

from everstep import oidc
from everstep.bearer_tokens import login_proof, mint_login
from everstep.clock import Clock
from everstep.errors import AuthenticationError, EverstepError, RateLimited
from everstep.log_lines import LogThrottle
from everstep.wire.v1 import operator as op
from everstep_controller.api import endpoints, web_page
from everstep_controller.api.routes import PLAIN_ROUTES
from everstep_controller.auth.authenticator import network_of
from everstep_controller.auth.credentials import Keyring
from everstep_controller.auth.identity_provider import IdentityProvider
from everstep_controller.auth.peers import UNKNOWN_PEER, ConnectionPeer
from everstep_controller.config import LOGIN_CALLBACK, OidcSettings
from everstep_controller.runtime.rate_limits import TokenBuckets
from everstep_controller.server import responses
from everstep_controller.server.connections import SCOPE_KEY

log = logging.getLogger(__name__)

LOGIN_PATH = "/v1/login"
LOGIN_TIMEOUT_S = 600.0
"""Seconds from the begin of a login to its end: time for a password, a second factor, and a forgotten tab."""
LOGINS_PER_S = 1.0
LOGINS_BURST_S = 30.0
"""Logins per second that one network may begin, and seconds' worth of them at once; as many may be finished. A finished
one costs a request to the provider."""
MAX_LOGINS = 32
"""Logins that may wait for the provider at the same time."""
MAX_CODE_CHARS = 4096
_ID_CHARS = 32
_HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer"}


def login_options(settings: OidcSettings) -> op.LoginOptions:
    """Return what clients need to know before a login. Nothing of it is secret."""
    if not settings.issuer:
        return op.LoginOptions()
    origin = urlsplit(settings.redirect_uri)
    return op.LoginOptions(
        issuer=settings.issuer,
        page=f"{origin.scheme}://{origin.netloc}{LOGIN_PATH}" if settings.redirect_uri else "",
        command_client_id=settings.command_client(),
        scopes=settings.scopes,
    )


class _PendingLogin(NamedTuple):
    """A login in progress: its random id, and what follows from it under one of the fleet's secrets."""

    id: str
    secret: bytes

    def proof(self, purpose: str) -> str:
        return login_proof(self.secret, purpose, self.id)


class LoginRoutes:
    """Handlers of a login. ``provider`` must have a redirect URI. ``now`` returns wall seconds.

    ``on_refused`` is called with the route and the code of each refused login, for the metrics.
    """

    def __init__(
        self,
        provider: IdentityProvider,
        keyring: Keyring,
        clock: Clock,
        now: Callable[[], float],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._provider = provider
        self._settings = provider.settings
        self._keyring = keyring
        self._clock = clock
        self._now = now
        self._on_refused = on_refused
        self._log = LogThrottle(log, clock.monotonic)  # strangers can cause these lines
        self._attempts: TokenBuckets[tuple[str, str]] = TokenBuckets(LOGINS_PER_S, LOGINS_BURST_S)
        self._running = 0
        self._is_secure = urlsplit(self._settings.redirect_uri).scheme == "https"
        # The prefix makes browsers accept the cookie over https and from this host only.
        self._cookie = "__Host-everstep-login" if self._is_secure else "everstep-login"

    def install(self, app: FastAPI) -> None:
        """Add the routes. They are pages for browsers, and so not part of the API's description."""
        app.add_api_route(LOGIN_PATH, self.begin, methods=["GET"], include_in_schema=False)
        app.add_api_route(LOGIN_CALLBACK, self.finish, methods=["GET"], include_in_schema=False)

    async def begin(self, request: Request) -> Response:
        """Send the browser to the provider."""
        try:
            self._count(LOGIN_PATH, request)
            metadata = await self._provider.metadata()
        except EverstepError as error:
            return self._failed(LOGIN_PATH, error)
        self._keyring.refresh(self._clock)
        secret = self._keyring.secrets[0]
        end = int(self._now() + LOGIN_TIMEOUT_S)
        pending = _PendingLogin(f"{secrets.token_hex(_ID_CHARS // 2)}.{end}", secret)
        settings = self._settings
        target = oidc.authorization_url(
            metadata,
            client_id=settings.client_id,
            redirect_uri=settings.redirect_uri,
            scopes=settings.scopes,
            state=pending.proof("state"),
            nonce=pending.proof("nonce"),
            verifier=pending.proof("verifier"),
        )
        response = Response(status_code=303, headers={**_HEADERS, "location": target})
        self._set_cookie(response, f"{pending.id}.{pending.proof('cookie')}", int(LOGIN_TIMEOUT_S))
        return response

    async def finish(self, request: Request) -> Response:
        """Log in the person that the provider sends back, and open the page with a token."""
        try:
            self._count(LOGIN_CALLBACK, request)
            target = await self._finish(request)
        except EverstepError as error:
            response = self._failed(LOGIN_CALLBACK, error)
        else:
            response = Response(status_code=303, headers={**_HEADERS, "location": target})
        self._set_cookie(response, "", 0)
        return response

    async def _finish(self, request: Request) -> str:
        query = responses.parse_query(request.scope)
        pending = self._pending(request)
        if not hmac.compare_digest(query.get("state", "").encode(), pending.proof("state").encode()):
            raise _foreign()
        if query.get("iss", self._settings.issuer) != self._settings.issuer:  # RFC 9207
            raise AuthenticationError("the answer is of another identity provider: log in again")
        if "error" in query:
            raise oidc.Refused(query["error"], query.get("error_description", ""))
        code = query.get("code", "")
        if not 0 < len(code) <= MAX_CODE_CHARS:
            raise AuthenticationError("the identity provider sent no code: log in again")
        if self._running >= MAX_LOGINS:
            raise RateLimited("too many people log in at this moment: try again", 1.0)
        self._running += 1
        try:
            identity = await self._provider.log_in(
                code, verifier=pending.proof("verifier"), nonce=pending.proof("nonce")
            )
        finally:
            self._running -= 1
        log.info("%s has logged in on the web page as %s", identity.subject, identity.role)
        end = self._now() + self._settings.session_s
        token = mint_login(self._keyring.secrets[0], identity.role, identity.subject, end)
        return f"/#{urlencode({'token': token})}"

    def _count(self, route: str, request: Request) -> None:
        peer: ConnectionPeer = request.scope.get(SCOPE_KEY) or UNKNOWN_PEER
        wait_s = self._attempts.take((route, network_of(peer.address)), self._clock.monotonic())
        if wait_s:
            raise RateLimited(f"too many logins from {peer.address}: try again in {wait_s:.0f} s", wait_s)

    # --- the cookie

    def _set_cookie(self, response: Response, value: str, max_age_s: int) -> None:
        path = "/" if self._is_secure else LOGIN_PATH
        # Lax: the provider's redirect is a navigation from another site, and must bring the cookie.
        response.set_cookie(
            self._cookie, value, max_age=max_age_s, path=path, secure=self._is_secure, httponly=True, samesite="lax"
        )

    def _pending(self, request: Request) -> _PendingLogin:
        """Return the login that this browser began. Raises AuthenticationError if there is none or it is over."""
        id, _, mac = request.cookies.get(self._cookie, "").rpartition(".")
        self._keyring.refresh(self._clock)
        for secret in self._keyring.secrets:
            pending = _PendingLogin(id, secret)
            if hmac.compare_digest(mac.encode(), pending.proof("cookie").encode()):
                if float(id.rpartition(".")[2]) < self._now():
                    break
                return pending
        raise _foreign()

    # --- failures

    def _failed(self, route: str, error: EverstepError) -> Response:
        """Return a page that says why a person is not logged in."""
        self._on_refused(route, error.code)
        self._log(logging.INFO, "a login on the web page failed: %s", error)
        headers = {**web_page.HEADERS, **_HEADERS}
        headers |= {name.decode(): value.decode() for name, value in responses.error_headers(error)}
        body = _FAILED_PAGE.format(why=html.escape(str(error)), again=LOGIN_PATH)
        return Response(body, status_code=error.status, media_type=web_page.MEDIA_TYPES["html"], headers=headers)


def _foreign() -> AuthenticationError:
    minutes = round(LOGIN_TIMEOUT_S / 60)
    return AuthenticationError(f"this login did not begin in this browser, or took over {minutes} minutes: begin again")


_FAILED_PAGE = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8" />
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <title>Everstep: not logged in</title>
    <link rel="icon" href="/web/icon.svg" type="image/svg+xml" />
    <link rel="stylesheet" href="/web/style.css" />
  </head>
  <body>
    <main class="login">
      <section>
        <h1>Not logged in</h1>
        <p role="alert">{why}</p>
        <p><a href="{again}">Log in again</a> or <a href="/">use a token</a>.</p>
      </section>
    </main>
  </body>
</html>
"""


def install(
    app: FastAPI,
    provider: IdentityProvider | None,
    keyring: Keyring,
    clock: Clock,
    now: Callable[[], float],
    on_refused: Callable[[str, str], None],
) -> None:
    """Add the routes of logins: always the one that tells whether there are any."""
    options = responses.encode(login_options(provider.settings if provider is not None else OidcSettings()))

    @app.api_route(PLAIN_ROUTES["login_options"].path, methods=endpoints.READING, include_in_schema=False)
    async def _options(_request: Request) -> Response:
        return Response(options, media_type="application/json")

    if provider is not None and provider.settings.redirect_uri:
        LoginRoutes(provider, keyring, clock, now, on_refused).install(app)
