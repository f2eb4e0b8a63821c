"""Tokens and documents of an identity provider, and the reasons of refusals."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from everstep import oidc
from everstep.errors import AuthenticationError, ConfigurationError, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from tests.support.services.openid_provider import CLIENT, OpenidProvider, new_key

NOW = SYSTEM_CLOCK.wall()


@pytest.fixture(scope="module")
def provider() -> Any:
    provider = OpenidProvider()
    provider.claims |= {"iat": NOW, "exp": NOW + provider.lifetime_s}  # the tests' time stands still at NOW
    yield provider
    provider._server.server_close()


@pytest.fixture
def keys(provider: OpenidProvider) -> oidc.Keys:
    return oidc.Keys.read(json.dumps(provider.jwks()).encode(), "keys")


def verify(provider: OpenidProvider, keys: oidc.Keys, token: str, now: float = NOW) -> dict[str, Any]:
    return oidc.verify(token, keys, issuer=provider.issuer, audiences=(CLIENT, "api"), now=now, skew_s=60.0)


def unsigned(header: dict[str, Any], claims: dict[str, Any], signature: str = "") -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, claims))
    return ".".join((*parts, signature))


def test_token_of_issuer_is_accepted(provider: OpenidProvider, keys: oidc.Keys) -> None:
    assert verify(provider, keys, provider.token())["sub"] == "00u1"
    assert verify(provider, keys, provider.token("api", header={"typ": "at+jwt"}))["aud"] == "api"
    assert verify(provider, keys, provider.token(["x", CLIENT]))["aud"] == ["x", CLIENT]


@pytest.mark.promise("roles")
@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"iss": "https://other.example"}, "'iss'"),
        ({"iss": None}, "'iss'"),
        ({"aud": "another client"}, "'aud'"),
        ({"aud": ["another client"]}, "'aud'"),
        ({"aud": None}, "'aud'"),
        ({"aud": []}, "'aud'"),
        ({"aud": {CLIENT: 1}}, "'aud'"),
        ({"exp": NOW - 61}, "expired"),
        ({"exp": None}, "'exp'"),
        ({"exp": "tomorrow"}, "'exp'"),
        ({"exp": float("nan")}, "'exp'"),
        ({"exp": float("inf")}, "'exp'"),
        ({"nbf": NOW + 120}, "'nbf'"),
        ({"iat": NOW + 120}, "'iat'"),
        ({"sub": None}, "'sub'"),
        ({"sub": 17}, "'sub'"),
        ({"sub": ""}, "'sub'|subject"),
        ({"sub": "olga\n2026 root logged in"}, "subject"),
        ({"sub": "x" * 256}, "subject"),
        ({"events": {"http://schemas.openid.net/event/backchannel-logout": {}}}, "security event"),
    ],
)
def test_token_with_wrong_claim_is_refused(
    provider: OpenidProvider, keys: oidc.Keys, claims: dict[str, Any], says: str
) -> None:
    audience = claims.pop("aud", CLIENT) if "aud" in claims else CLIENT
    with pytest.raises(AuthenticationError, match=says):
        verify(provider, keys, provider.token(audience, **claims))


def test_clock_skew_is_allowed_within_its_bound(provider: OpenidProvider, keys: oidc.Keys) -> None:
    token = provider.token(iat=NOW, nbf=NOW, exp=NOW + 100)
    verify(provider, keys, token, NOW - 59)
    verify(provider, keys, token, NOW + 159)
    for now in (NOW - 61, NOW + 161):
        with pytest.raises(AuthenticationError):
            verify(provider, keys, token, now)


@pytest.mark.promise("roles")
def test_forged_signature_is_refused(provider: OpenidProvider, keys: oidc.Keys) -> None:
    claims = {"iss": provider.issuer, "aud": CLIENT, "sub": "root", "exp": NOW + 60}
    other = new_key("k1")
    public = provider.keys[0].as_pem(private=False)
    head = {"alg": "RS256", "kid": "k1"}
    genuine = provider.token()
    forged = [
        jwt.encode(head, claims, other),
        unsigned({"alg": "none"}, claims),
        unsigned({"alg": "None", "kid": "k1"}, claims),
        unsigned({"kid": "k1"}, claims),
        unsigned(head, claims),
        unsigned(head, claims, "AAAA"),
        jwt.encode({"alg": "HS256", "kid": "k1"}, claims, OctKey.import_key(base64.b64encode(public))),
        jwt.encode(head | {"jwk": other.as_dict(private=False)}, claims, other),
        unsigned(head | {"crit": ["x"], "x": 1}, claims, "AAAA"),
        genuine[:-4] + "AAAA",
        genuine.rpartition(".")[0] + ".",
        unsigned(head, claims, genuine.rpartition(".")[2]),
    ]
    for token in forged:
        with pytest.raises(AuthenticationError):
            verify(provider, keys, token)


def test_other_documents_of_issuer_are_refused(provider: OpenidProvider, keys: oidc.Keys) -> None:
    for kind in ("logout+jwt", "secevent+jwt", "dpop+jwt", 7):
        with pytest.raises(AuthenticationError, match="not accepted"):
            verify(provider, keys, unsigned({"alg": "RS256", "kid": "k1", "typ": kind}, {}, "AAAA"))


@pytest.mark.parametrize(
    "token",
    ["eyJ..", "eyJ.a.b", "eyJ" + "[" * 400 + ".e30.AAAA", "eyJ" + "x" * 13_000 + "..", "\xff.\xff.\xff", "..", ""],
    ids=range(7),
)
def test_damaged_token_is_refused(provider: OpenidProvider, keys: oidc.Keys, token: str) -> None:
    with pytest.raises(AuthenticationError):
        verify(provider, keys, token)


def test_key_must_allow_the_algorithm(provider: OpenidProvider, keys: oidc.Keys) -> None:
    claims = {"iss": provider.issuer, "aud": CLIENT, "sub": "x", "exp": NOW + 60}
    same = RSAKey.import_key(provider.keys[0].as_dict(private=True) | {"alg": "PS256"})
    token = jwt.encode({"alg": "PS256", "kid": "k1"}, claims, same, algorithms=["PS256"])
    with pytest.raises(AuthenticationError, match="not that of its key"):
        verify(provider, keys, token)


def test_keys_leave_out_other_than_signing_keys(provider: OpenidProvider) -> None:
    good = provider.keys[0].as_dict(private=False)
    encryption = good | {"kid": "e", "use": "enc"}
    shared = {"kty": "oct", "kid": "s", "k": "AAAA"}
    short = json.loads(json.dumps(good)) | {"kid": "w"}
    short["n"] = short["n"][:171]
    others = [encryption, shared, short, {"kty": "RSA", "kid": "x"}, {"kty": "new", "kid": "y"}, 7, {}]
    keys = oidc.Keys.read(json.dumps({"keys": [good, *others]}).encode(), "keys")
    assert keys.has("k1")
    assert keys.has("")
    assert not any(keys.has(name) for name in "eswxy")
    without_keys: tuple[dict[str, object], ...] = ({"keys": others}, {"keys": []}, {"keys": 7}, {})
    for document in without_keys:
        with pytest.raises(Unavailable, match="no key"):
            oidc.Keys.read(json.dumps(document).encode(), "keys")


def test_token_of_unknown_key_raises_unknown_key(provider: OpenidProvider, keys: oidc.Keys) -> None:
    with pytest.raises(oidc.UnknownKey):
        verify(provider, keys, provider.token(header={"kid": "k9"}))
    two = oidc.Keys.read(
        json.dumps({"keys": [*provider.jwks()["keys"], new_key("k2").as_dict(private=False)]}).encode(), "keys"
    )
    with pytest.raises(oidc.UnknownKey):
        two.find("")


@pytest.mark.parametrize(
    ("url", "is_accepted"),
    [
        ("https://id.example.com/realms/ai", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://[::1]:8080", True),
        ("http://localhost:8080", True),
        ("http://id.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://127.0.0.1@example.com", False),
        ("https://olga:x@id.example.com", False),
        ("https://id.example.com/#x", False),
        ("https://", False),
        ("ftp://127.0.0.1", False),
        ("https://id.example.com:0", False),
        ("https://id.example.com:x", False),
        ("https://id.example.com/\nx", False),
        ("", False),
    ],
)
def test_secrets_are_sent_by_tls_or_loopback_only(url: str, is_accepted: bool) -> None:
    if is_accepted:
        assert oidc.check_url(url, "x") == url
    else:
        with pytest.raises(ConfigurationError):
            oidc.check_url(url, "x")


def test_metadata_must_be_of_the_issuer(provider: OpenidProvider) -> None:
    good = provider.metadata()
    assert oidc.read_provider(json.dumps(good).encode(), provider.issuer).jwks_uri == good["jwks_uri"]
    for change in (
        {"issuer": "https://evil.example"},
        {"issuer": provider.issuer + "/"},
        {"jwks_uri": "http://evil.example/keys"},
        {"token_endpoint": "file:///etc/passwd"},
        {"jwks_uri": ""},
    ):
        with pytest.raises(Unavailable):
            oidc.read_provider(json.dumps(good | change).encode(), provider.issuer)
    with pytest.raises(Unavailable):
        oidc.read_provider(b"<html>", provider.issuer)


def test_claim_values_follow_dots_after_the_whole_name() -> None:
    claims = {"groups": ["a", 7, "b"], "https://x.example/roles": "c", "realm_access": {"roles": ["d"]}, "a.b": ["e"]}
    assert oidc.claim_values(claims, "groups") == {"a", "b"}
    assert oidc.claim_values(claims, "https://x.example/roles") == {"c"}
    assert oidc.claim_values(claims, "realm_access.roles") == {"d"}
    assert oidc.claim_values(claims, "a.b") == {"e"}
    for name in ("none", "groups.x", "realm_access", "realm_access.roles.x", ""):
        assert oidc.claim_values(claims, name) == frozenset()


def test_login_needs_its_own_nonce_client_and_token_hash(provider: OpenidProvider, keys: oidc.Keys) -> None:
    tokens = provider._tokens(CLIENT, nonce="n")
    claims = verify(provider, keys, tokens["id_token"])
    given = {"nonce": "n", "client_id": CLIENT, "access_token": tokens["access_token"]}
    oidc.check_login(claims, tokens["id_token"], **given)
    for change in ({"nonce": "m"}, {"access_token": "another"}):
        with pytest.raises(AuthenticationError, match="does not belong"):
            oidc.check_login(claims, tokens["id_token"], **(given | change))
    without = {name: value for name, value in claims.items() if name != "nonce"}
    for other in (without, claims | {"azp": "another"}):
        with pytest.raises(AuthenticationError, match="does not belong"):
            oidc.check_login(other, tokens["id_token"], **given)


def test_refusals_of_the_provider_are_shown_in_one_line() -> None:
    body = json.dumps({"error": "invalid_grant", "error_description": "no\n\x1b[31mred" + "x" * 1000}).encode()
    with pytest.raises(oidc.Refused) as caught:
        oidc.read_answer(400, body, oidc.TokenAnswer, "url")
    assert caught.value.reason == "invalid_grant"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    with pytest.raises(Unavailable, match="status 502"):
        oidc.read_answer(502, b"<html>", oidc.TokenAnswer, "url")
