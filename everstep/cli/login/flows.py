"""Log in through a browser on this machine, which comes back to a port on loopback (RFC 8252), or through a browser
anywhere, into which a person enters a code (RFC 8628)."""

from __future__ import annotations

import hmac
import secrets
import sys
import time
import webbrowser
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qsl, urlsplit

from everstep import oidc
from everstep.cli.context import error_console
from everstep.cli.login import stored
from everstep.errors import AuthenticationError, ConfigurationError
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import operator as op

LOGIN_TIMEOUT_S = 300.0
"""Seconds for a person to log in in the browser of this machine."""
CLOCK_SKEW_S = 300.0
"""Seconds that the clocks of this machine and of the provider may differ at a login."""
CALLBACK = "/callback"
GRANT_DEVICE = "urn:ietf:params:oauth:grant-type:device_code"
SLOWER_S = 5.0


def find_provider(options: op.LoginOptions, ca_file: str) -> oidc.Provider:
    """Return the metadata of the controller's provider. Raises ConfigurationError if commands cannot log in.

    ``ca_file``: authorities that are trusted besides the system's.
    """
    if not options.issuer:
        raise ConfigurationError("this controller has no login: use a token (--token-file), or set oidc_issuer there")
    if not options.command_client_id:
        raise ConfigurationError("this controller has no client for commands: set oidc_command_client_id there")
    issuer = oidc.check_url(options.issuer, "the issuer")
    url = oidc.discovery_url(issuer)
    return oidc.read_provider(_get(url, ca_file), issuer)


def _get(url: str, ca_file: str) -> bytes:
    status, body = stored.send(url, ca_file)
    if status != 200:
        raise AuthenticationError(f"the identity provider answered {url} with status {status}")
    return body


def prefers_device(provider: oidc.Provider, environ: Mapping[str, str]) -> bool:
    """Return whether this machine has no browser of the person, and the provider has codes."""
    has_display = sys.platform == "darwin" or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))
    is_remote = "SSH_CONNECTION" in environ or not has_display
    return is_remote and bool(provider.device_authorization_endpoint)


def _checked(
    options: op.LoginOptions, provider: oidc.Provider, tokens: oidc.TokenAnswer, ca_file: str, nonce: str = ""
) -> oidc.TokenAnswer:
    """Return the tokens if the ID token belongs to this login."""
    client_id = options.command_client_id
    if not tokens.id_token:
        raise AuthenticationError("the identity provider sent no ID token: oidc_scopes must contain openid")
    keys = oidc.Keys.read(_get(provider.jwks_uri, ca_file), provider.jwks_uri)
    claims = oidc.verify(
        tokens.id_token,
        keys,
        issuer=provider.issuer,
        audiences=(client_id,),
        now=SYSTEM_CLOCK.wall(),
        skew_s=CLOCK_SKEW_S,
    )
    oidc.check_login(claims, tokens.id_token, nonce=nonce, client_id=client_id, access_token=tokens.access_token)
    return tokens


# ---- a browser anywhere


def log_in_by_device(options: op.LoginOptions, provider: oidc.Provider, ca_file: str) -> oidc.TokenAnswer:
    """Show a code, and return the tokens once a person has entered it. Raises AuthenticationError."""
    client_id = options.command_client_id
    request = oidc.device_request(provider, client_id, options.scopes)
    answer = oidc.read_answer(*stored.send(request, ca_file), oidc.DeviceAnswer, request.url)
    oidc.check_url(answer.verification_uri, "the address for the code")
    error_console.print(f"open {answer.verification_uri} and enter {answer.user_code}", style="bold")
    interval_s, end = max(answer.interval, 0.1), SYSTEM_CLOCK.monotonic() + answer.expires_in
    while SYSTEM_CLOCK.monotonic() < end:
        time.sleep(interval_s)
        request = oidc.token_request(provider, client_id, "", GRANT_DEVICE, device_code=answer.device_code)
        try:
            tokens = oidc.read_answer(*stored.send(request, ca_file), oidc.TokenAnswer, request.url)
        except oidc.Refused as error:
            if error.reason not in ("authorization_pending", "slow_down"):
                raise
            interval_s += SLOWER_S if error.reason == "slow_down" else 0.0
        else:
            return _checked(options, provider, tokens, ca_file)
    raise AuthenticationError("the code was not entered in time: run `everstep login` again")


# ---- the browser of this machine


class _Callback(HTTPServer):
    """Waits on loopback for the browser. ``answer`` is the query that came with the right state."""

    def __init__(self, port: int, state: str) -> None:
        try:
            super().__init__(("127.0.0.1", port), _CallbackHandler)
        except OSError as error:
            raise ConfigurationError(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}") from error
        self.timeout = 1.0
        self.state = state
        self.answer: dict[str, str] | None = None

    @property
    def redirect_uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{CALLBACK}"

    def wait(self) -> dict[str, str]:
        """Return the answer. Raises AuthenticationError if none comes."""
        end = SYSTEM_CLOCK.monotonic() + LOGIN_TIMEOUT_S
        while self.answer is None and SYSTEM_CLOCK.monotonic() < end:
            self.handle_request()
        if self.answer is None:
            raise AuthenticationError("no browser came back in time: `everstep login` again, or with --device")
        return self.answer


class _CallbackHandler(BaseHTTPRequestHandler):
    server: _Callback
    timeout = 5.0  # browsers open connections that they do not use

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        right = hmac.compare_digest(query.get("state", "").encode(), self.server.state.encode())
        if parts.path != CALLBACK or not right:
            self._reply(404, "There is nothing here.")
            return
        self.server.answer = query
        self._reply(200, "Go back to your terminal. You may close this tab.")

    def _reply(self, status: int, text: str) -> None:
        body = f"<!doctype html><meta charset=utf-8><title>everstep login</title><p>{text}</p>".encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", "default-src 'none'"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def log_in_by_browser(options: op.LoginOptions, provider: oidc.Provider, ca_file: str, port: int) -> oidc.TokenAnswer:
    client_id, nonce, verifier = options.command_client_id, secrets.token_hex(16), secrets.token_hex(32)
    with _Callback(port, secrets.token_hex(32)) as server:
        address = oidc.authorization_url(
            provider,
            client_id=client_id,
            redirect_uri=server.redirect_uri,
            scopes=options.scopes,
            state=server.state,
            nonce=nonce,
            verifier=verifier,
        )
        error_console.print(f"open this address if no browser opens: {address}", soft_wrap=True)
        webbrowser.open(address)
        query = server.wait()
    if "error" in query:
        raise oidc.Refused(query["error"], query.get("error_description", ""))
    if query.get("iss", provider.issuer) != provider.issuer or not query.get("code"):
        raise AuthenticationError("the browser came back without a code of this identity provider")
    request = oidc.token_request(
        provider,
        client_id,
        "",
        "authorization_code",
        code=query["code"],
        redirect_uri=server.redirect_uri,
        code_verifier=verifier,
    )
    tokens = oidc.read_answer(*stored.send(request, ca_file), oidc.TokenAnswer, request.url)
    return _checked(options, provider, tokens, ca_file, nonce)
