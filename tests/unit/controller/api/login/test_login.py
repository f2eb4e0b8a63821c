"""The web page's login, request by request."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from everstep.bearer_tokens import LOGIN_PREFIX, TokenRole, login_proof
from everstep.clock import ManualClock
from everstep.log_lines import BURST
from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.api import login
from everstep_controller.auth.credentials import Keyring
from everstep_controller.auth.identity_provider import IdentityProvider
from everstep_controller.config import OidcSettings
from tests.support.services.openid_provider import CLIENT, CLIENT_SECRET, OpenidProvider, openid_provider

SECRET = b"a secret of the fleet, 32 bytes."
ORIGIN = "http://127.0.0.1:7700"
REDIRECT = f"{ORIGIN}/v1/login/callback"


@pytest.fixture
def provider() -> Iterator[OpenidProvider]:
    with openid_provider() as running:
        running.redirect_uris = {REDIRECT}
        yield running


class Site:
    """The routes of logins, and a browser that follows redirects to the provider only on request."""

    def __init__(self, provider: OpenidProvider, folder: Path, secret: bytes = SECRET, **changes: Any) -> None:
        file = folder / "client-secret"
        file.write_text(CLIENT_SECRET)
        file.chmod(0o600)
        given = {"redirect_uri": REDIRECT, "client_secret_file": str(file), **changes}
        self.settings = OidcSettings(
            issuer=provider.issuer, client_id=CLIENT, roles=("gpu-admins=operator", "staff=viewer"), **given
        )
        self.clock = ManualClock(wall=SYSTEM_CLOCK.wall())
        self.refused: list[tuple[str, str]] = []
        self.keyring = Keyring((secret,))
        app = FastAPI()
        login.install(
            app,
            IdentityProvider(self.settings, self.clock),
            self.keyring,
            self.clock,
            self.clock.wall,
            lambda route, code: self.refused.append((route, code)),
        )
        origin = self.settings.redirect_uri.partition("/v1")[0] or ORIGIN
        self.browser = TestClient(app, base_url=origin, follow_redirects=False)

    def begin(self) -> str:
        """Begin a login, and return the provider's address for it."""
        answer = self.browser.get("/v1/login")
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])

    def agree(self, address: str) -> str:
        """The address at which the provider sends the browser back."""
        answer = httpx.get(address)
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]

    def finish(self, address: str, **changes: str | None) -> Any:
        query = dict(parse_qsl(urlsplit(address).query)) | changes
        given = {name: value for name, value in query.items() if value is not None}
        return self.browser.get(f"{urlsplit(address).path}?{urlencode(given)}")

    def log_in(self) -> Any:
        return self.finish(self.agree(self.begin()))


@pytest.fixture
def site(provider: OpenidProvider, tmp_path: Path) -> Site:
    return Site(provider, tmp_path)


def test_login_ends_with_a_short_token_in_the_fragment(site: Site, provider: OpenidProvider) -> None:
    address = site.begin()
    asked = parse_qs(urlsplit(address).query)
    assert asked["redirect_uri"] == [REDIRECT]
    assert asked["response_type"] == ["code"]
    assert asked["code_challenge_method"] == ["S256"]
    answer = site.finish(site.agree(address))
    assert answer.status_code == 303
    assert answer.headers["cache-control"] == "no-store"
    target = urlsplit(answer.headers["location"])
    assert (target.scheme, target.netloc, target.path, target.query) == ("", "", "/", "")
    token = parse_qs(target.fragment)["token"][0]
    assert token.startswith(LOGIN_PREFIX)
    identity = site.keyring.verify_login(token)
    assert (identity.role, identity.subject) == (TokenRole.OPERATOR, f"olga (00u1 at {provider.issuer})")
    assert identity.ends_at == site.clock.wall() + 3600


def test_cookie_is_for_this_host_and_no_script(provider: OpenidProvider, tmp_path: Path) -> None:
    for origin, name in ((ORIGIN, "everstep-login"), ("https://c.example.com", "__Host-everstep-login")):
        site = Site(provider, tmp_path, redirect_uri=f"{origin}/v1/login/callback")
        cookie = site.browser.get("/v1/login").headers["set-cookie"]
        parts = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert cookie.startswith(f"{name}=")
        assert {"httponly", "samesite=lax", "max-age=600"} <= parts
        assert ("secure" in parts) == origin.startswith("https")
        assert not any(part.startswith("domain") for part in parts)


@pytest.mark.promise("roles")
def test_login_of_another_browser_is_refused(site: Site, provider: OpenidProvider, tmp_path: Path) -> None:
    """Else an attacker could log a person in as the attacker, or use a code that was intercepted."""
    other = Site(provider, tmp_path)
    back = site.agree(site.begin())
    for answer in (other.finish(back), (other.begin(), other.finish(back))[1]):
        assert answer.status_code == 401
        assert "did not begin in this browser" in answer.text
    assert "/token" not in provider.requests
    assert site.finish(back).status_code == 303


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state": "x" * 64}, "did not begin in this browser"),
        ({"state": None}, "did not begin in this browser"),
        ({"state": "\u00e9"}, "did not begin in this browser"),
        ({"code": None}, "sent no code"),
        ({"code": "x" * 5000}, "sent no code"),
        ({"code": "guessed"}, "invalid_grant"),
        ({"iss": "https://evil.example"}, "another identity provider"),
        ({"error": "access_denied", "error_description": "<script>alert(1)</script>"}, "&lt;script&gt;"),
    ],
)
def test_wrong_answer_of_provider_is_refused(site: Site, changes: dict[str, str | None], says: str) -> None:
    answer = site.finish(site.agree(site.begin()), **changes)
    assert answer.status_code == 401
    assert says in answer.text
    assert "<script" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "token=" not in answer.text
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert site.refused == [("/v1/login/callback", "unauthenticated")]


def test_code_and_cookie_are_good_for_one_login(site: Site) -> None:
    back = site.agree(site.begin())
    cookie = dict(site.browser.cookies)
    assert site.finish(back).status_code == 303
    assert site.finish(back).status_code == 401
    site.browser.cookies.update(cookie)
    answer = site.finish(back)
    assert (answer.status_code, "invalid_grant" in answer.text) == (401, True)


def test_slow_login_is_refused(site: Site) -> None:
    back = site.agree(site.begin())
    site.clock.advance(601)
    assert site.finish(back).status_code == 401


def test_cookie_is_bound_to_the_fleets_secret(site: Site, provider: OpenidProvider, tmp_path: Path) -> None:
    back = site.agree(site.begin())
    (name,) = site.browser.cookies.keys()
    value = site.browser.cookies[name]
    id, _, mac = value.rpartition(".")
    later = f"{id.partition('.')[0]}.{2 * 10**9}"
    foreign = login_proof(b"another secret of sixteen bytes", "cookie", id)
    for forged in (f"{later}.{mac}", f"{id}.{foreign}", f"{id}.", f"{id}", "", "..", "x.nan.0", f"{id}.{mac}0"):
        site.browser.cookies.clear()
        site.browser.cookies.set(name, forged)
        assert site.finish(back).status_code == 401, forged
    site.keyring.secrets = (b"a newer secret of the fleet, too", SECRET)
    site.browser.cookies.clear()
    site.browser.cookies.set(name, value)
    assert site.finish(back).status_code == 303  # the old secret still verifies


def test_any_controller_of_the_fleet_finishes_a_login(site: Site, provider: OpenidProvider, tmp_path: Path) -> None:
    back = site.agree(site.begin())
    other = Site(provider, tmp_path)
    other.browser.cookies.update(dict(site.browser.cookies))
    assert other.finish(back).status_code == 303


@pytest.mark.promise("roles")
def test_id_token_of_another_login_is_refused(site: Site, provider: OpenidProvider) -> None:
    back = site.agree(site.begin())
    genuine = provider.token
    provider.token = lambda audience=CLIENT, **claims: genuine(audience, **(claims | {"nonce": "of another"}))  # type: ignore[method-assign]
    answer = site.finish(back)
    assert (answer.status_code, "does not belong to this login" in answer.text) == (401, True)


def test_person_without_role_is_refused_with_reason(site: Site, provider: OpenidProvider) -> None:
    provider.claims["groups"] = ["visitors"]
    answer = site.log_in()
    assert answer.status_code == 403
    assert re.search(r"olga \(00u1 at .*\) has no role here", answer.text)


def test_secret_of_client_is_needed(provider: OpenidProvider, tmp_path: Path) -> None:
    site = Site(provider, tmp_path, client_secret_file="")
    answer = site.log_in()
    assert (answer.status_code, "invalid_client" in answer.text) == (401, True)


def test_lost_provider_fails_logins_only(site: Site, provider: OpenidProvider) -> None:
    provider.is_broken = True
    answer = site.browser.get("/v1/login")
    assert answer.status_code == 503
    assert "status 500" in answer.text
    assert site.refused == [("/v1/login", "unavailable")]


def test_logins_of_one_network_are_bounded(site: Site) -> None:
    found = [site.browser.get("/v1/login").status_code for _ in range(40)]
    assert found.count(303) == 30
    assert found.count(429) == 10
    site.clock.advance(1)
    assert site.browser.get("/v1/login").status_code == 303


def test_refused_logins_fill_no_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, login.__name__)
    for _ in range(60):
        site.browser.get("/v1/login/callback")
    assert 1 <= len(caplog.records) <= BURST


def test_options_name_the_page_and_no_secret(site: Site, provider: OpenidProvider) -> None:
    assert site.browser.get("/v1/login/options").json() == {
        "issuer": provider.issuer,
        "page": f"{ORIGIN}/v1/login",
        "scopes": ["openid", "profile", "email"],
    }


def test_page_has_no_login_without_redirect_uri(provider: OpenidProvider, tmp_path: Path) -> None:
    site = Site(provider, tmp_path, redirect_uri="", client_secret_file="")
    assert site.browser.get("/v1/login/options").json() == {
        "issuer": provider.issuer,
        "command_client_id": CLIENT,
        "scopes": ["openid", "profile", "email"],
    }
    for path in ("/v1/login", "/v1/login/callback"):
        assert site.browser.get(path).status_code == 404
