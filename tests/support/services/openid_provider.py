"""An OpenID Connect provider on loopback, with logins by code and by device, refresh and revocation."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

from everstep.system_clock import SYSTEM_CLOCK

CLIENT = "everstep"
CLIENT_SECRET = "the secret of the client"
COMMANDS = "everstep-commands"
"""A public client, for commands."""


class OpenidProvider:
    """A provider with one user, which approves every login. Tests read and change its fields."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.issuer = f"http://127.0.0.1:{self._server.server_port}/fleet"
        self.keys = [new_key("k1")]
        self.claims: dict[str, Any] = {"sub": "00u1", "preferred_username": "olga", "groups": ["staff", "gpu-admins"]}
        self.lifetime_s = 300.0
        self.redirect_uris = {"http://127.0.0.1/callback"}
        self.agrees = True
        self.approves_devices = True
        self.is_broken = False
        self.metadata_changes: dict[str, Any] = {}
        self.requests: list[str] = []
        self.revoked: list[str] = []
        self._codes: dict[str, dict[str, str]] = {}
        self._devices: dict[str, str] = {}
        self.refresh_tokens: dict[str, str] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()

    def token(self, audience: Any = CLIENT, *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a signed token. A claim that is None is left out."""
        now = SYSTEM_CLOCK.wall()
        given = {"iss": self.issuer, "aud": audience, "iat": now, "exp": now + self.lifetime_s, **self.claims, **claims}
        key = self.keys[0]
        head = {"alg": "RS256", "kid": key.kid, **(header or {})}
        return jwt.encode(head, {name: value for name, value in given.items() if value is not None}, key)

    def metadata(self) -> dict[str, Any]:
        paths = {
            "jwks_uri": "keys",
            "authorization_endpoint": "authorize",
            "token_endpoint": "token",
            "device_authorization_endpoint": "device",
            "revocation_endpoint": "revoke",
        }
        found = {"issuer": self.issuer} | {name: f"{self.issuer}/{path}" for name, path in paths.items()}
        return found | self.metadata_changes

    def jwks(self) -> dict[str, Any]:
        return {"keys": [key.as_dict(private=False) for key in self.keys]}

    def authorize(self, query: dict[str, str]) -> str:
        """Return the URL of the redirect. Raises ValueError where a provider would show an error page."""
        target = query["redirect_uri"]
        is_native = query["client_id"] == COMMANDS and urlsplit(target).hostname == "127.0.0.1"
        if target not in self.redirect_uris and not is_native:
            raise ValueError(f"{target} is not registered")
        if not self.agrees:
            return f"{target}?{urlencode({'error': 'access_denied', 'state': query['state']})}"
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(16)
        self._codes[code] = query
        return f"{target}?{urlencode({'code': code, 'state': query['state'], 'session_state': 'x'})}"

    def exchange(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        client = form.get("client_id", "")
        if authorization:
            client, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
            if (client, secret) != (CLIENT, CLIENT_SECRET):
                return 401, {"error": "invalid_client"}
        elif client != COMMANDS:
            return 401, {"error": "invalid_client"}
        grant = form["grant_type"]
        if grant == "authorization_code":
            request = self._codes.pop(form["code"], None)
            challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).decode()
            if (
                request is None
                or request["code_challenge"] != challenge.rstrip("=")
                or (request["redirect_uri"], request["client_id"]) != (form["redirect_uri"], client)
            ):
                return 400, {"error": "invalid_grant", "error_description": "the code is unknown or used"}
            return 200, self._tokens(client, nonce=request["nonce"])
        if grant == "refresh_token":
            if self.refresh_tokens.pop(form["refresh_token"], None) != client:
                return 400, {"error": "invalid_grant"}
            return 200, self._tokens(client)
        if self._devices.get(form["device_code"]) != client:
            return 400, {"error": "invalid_grant"}
        if not self.approves_devices:
            return 400, {"error": "authorization_pending"}
        return 200, self._tokens(client)

    def _tokens(self, client: str, **claims: Any) -> dict[str, Any]:
        refresh, access = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.refresh_tokens[refresh] = client
        half = hashlib.sha256(access.encode()).digest()[:16]
        claims["at_hash"] = base64.urlsafe_b64encode(half).decode().rstrip("=")
        id_token = self.token(client, **claims)
        return {"access_token": access, "token_type": "Bearer", "id_token": id_token, "refresh_token": refresh}

    def device(self, form: dict[str, str]) -> dict[str, Any]:
        code = secrets.token_urlsafe(16)
        self._devices[code] = form["client_id"]
        return {
            "device_code": code,
            "user_code": "WDJB-MJHT",
            "verification_uri": f"{self.issuer}/activate",
            "expires_in": 60,
            "interval": 0.2,
        }


def new_key(name: str, bits: int = 2048) -> RSAKey:
    return RSAKey.generate_key(bits, parameters={"kid": name, "use": "sig", "alg": "RS256"})


def _handler(provider: OpenidProvider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            path = parts.path.removeprefix("/fleet")
            provider.requests.append(path)
            if provider.is_broken:
                self._answer(500, b"broken")
            elif path == "/.well-known/openid-configuration":
                self._json(200, provider.metadata())
            elif path == "/keys":
                self._json(200, provider.jwks())
            elif path == "/authorize":
                try:
                    target = provider.authorize(_flat(parts.query))
                except ValueError as error:
                    self._answer(400, str(error).encode())
                else:
                    self._answer(302, b"", ("Location", target))
            else:
                self._answer(404, b"")

        def do_POST(self) -> None:
            path = urlsplit(self.path).path.removeprefix("/fleet")
            provider.requests.append(path)
            form = _flat(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if path == "/token":
                self._json(*provider.exchange(form, self.headers.get("Authorization", "")))
            elif path == "/device":
                self._json(200, provider.device(form))
            elif path == "/revoke":
                provider.revoked.append(form["token"])
                self._answer(200, b"")
            else:
                self._answer(404, b"")

        def _json(self, status: int, body: Any) -> None:
            self._answer(status, json.dumps(body).encode(), ("Content-Type", "application/json"))

        def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _flat(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


@contextmanager
def openid_provider() -> Iterator[OpenidProvider]:
    """Yield a started provider, and stop it at the end."""
    provider = OpenidProvider()
    provider.start()
    try:
        yield provider
    finally:
        provider.stop()


def login_settings(folder: Path, provider: OpenidProvider, redirect_uri: str = "") -> Path:
    """Write a controller's settings file for logins by this provider, and return its path."""
    secret = folder / "client-secret"
    secret.write_text(CLIENT_SECRET)
    secret.chmod(0o600)
    lines = [
        f'issuer = "{provider.issuer}"',
        f'client_id = "{CLIENT}"',
        f'client_secret_file = "{secret}"',
        f'command_client_id = "{COMMANDS}"',
        f'redirect_uri = "{redirect_uri}"',
        'roles = ["gpu-admins=operator", "staff=viewer"]',
    ]
    file = folder / "login.toml"
    file.write_text("\n".join(["[oidc]", *lines]) + "\n")
    return file
