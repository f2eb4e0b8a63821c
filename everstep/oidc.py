"""Speak OpenID Connect without I/O: read a provider's documents, build its requests, and verify its tokens.

The controller and the command line send the requests. Building requests and verifying tokens needs the packages of
``everstep[oidc]``, which are imported by the first call.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from everstep.errors import DECODE_ERRORS, AuthenticationError, ConfigurationError, Unavailable

if TYPE_CHECKING:
    from joserfc.jwk import Key
    from joserfc.jws import JWSRegistry

T = TypeVar("T")

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Accepted signatures, all with public keys: ``none`` and shared secrets (``HS256``) prove nothing here."""
TOKEN_TYPES = ("jwt", "at+jwt", "application/at+jwt")
"""Accepted ``typ`` headers. Providers also sign other documents with these keys, such as logout requests."""
MAX_TOKEN_CHARS = 12 << 10
"""Maximum characters of a token, below the 16 KiB of a request's head; with 200 groups it may have 10 KiB."""
MAX_HEADER_CHARS = 4096
"""Maximum characters of its header, which may contain a certificate."""
MAX_DOCUMENT_BYTES = 256 << 10
"""Maximum bytes of an answer of the provider."""
REQUEST_TIMEOUT_S = 5.0
"""Seconds for which a provider may be silent."""
MIN_RSA_BITS = 2048
_KEY_TYPES = ("RSA", "EC")  # pairs of keys; not "oct", a shared secret
MAX_SUBJECT_CHARS = 255
"""Maximum characters of a subject, by OpenID Connect."""
_SHOWN_CHARS = 200


class UnknownKey(AuthenticationError):
    """The token's key is not among the provider's: it is forged, or the keys are outdated."""


# ---- addresses


def check_installed(why: str) -> None:
    """Raise ConfigurationError if the packages of ``everstep[oidc]`` are missing; ``why`` begins the message."""
    if any(find_spec(name) is None for name in ("authlib", "joserfc")):
        raise ConfigurationError(f"{why} needs Authlib and joserfc: pip install 'everstep[oidc]'")


def is_loopback(url: str) -> bool:
    """Return whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_url(url: str, name: str) -> str:
    """Return ``url`` if secrets may be sent there: https, or http on loopback. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and parts.port != 0 and not parts.username and not parts.fragment
    except ValueError:
        is_valid = False
    if not is_valid or parts.scheme not in ("http", "https") or not url.isascii() or not url.isprintable():
        raise ConfigurationError(f"{name} must be an https URL, not {url[:_SHOWN_CHARS]!r}")
    if parts.scheme == "http" and not is_loopback(url):
        raise ConfigurationError(f"{name} must be https unless its host is loopback, not {url[:_SHOWN_CHARS]!r}")
    return url


# ---- documents of the provider


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider's metadata (OpenID Connect Discovery)."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str = ""
    token_endpoint: str = ""
    device_authorization_endpoint: str = ""  # RFC 8628; empty: commands log in by browser only
    revocation_endpoint: str = ""  # RFC 7009
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


_ENDPOINTS = (
    "jwks_uri",
    "authorization_endpoint",
    "token_endpoint",
    "device_authorization_endpoint",
    "revocation_endpoint",
)


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the token endpoint."""

    id_token: str = ""
    access_token: str = ""
    refresh_token: str = ""


class DeviceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the device authorization endpoint."""

    device_code: str
    user_code: str
    verification_uri: str
    expires_in: float
    verification_uri_complete: str = ""
    interval: float = 5.0


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    error: str
    error_description: str = ""


class Refused(AuthenticationError):
    """The provider refused; ``reason`` is its code, such as ``authorization_pending``."""

    def __init__(self, reason: str, description: str = "") -> None:
        super().__init__(f"the identity provider refused: {shown(': '.join(filter(None, (reason, description))))}")
        self.reason = reason


def shown(text: str) -> str:
    """Return foreign text for a message: on one line, without control characters, and not too long."""
    return "".join(character if character.isprintable() else " " for character in text[:_SHOWN_CHARS])


def discovery_url(issuer: str) -> str:
    """Return the address of an issuer's metadata."""
    return issuer.rstrip("/") + "/.well-known/openid-configuration"


def _decode(body: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as error:
        raise Unavailable(f"cannot read the identity provider's answer at {url}: {error}") from error


def read_provider(body: bytes, issuer: str) -> Provider:
    """Return an issuer's metadata. Raises Unavailable if it belongs to another issuer or names unsafe endpoints."""
    url = discovery_url(issuer)
    provider = _decode(body, Provider, url)
    if provider.issuer != issuer:
        raise Unavailable(f"{url} names the issuer {shown(provider.issuer)!r}: set oidc_issuer to exactly that")
    try:
        for name in _ENDPOINTS:
            if getattr(provider, name) or name == "jwks_uri":
                check_url(getattr(provider, name), f"{name} of {url}")
    except ConfigurationError as error:
        raise Unavailable(str(error)) from error
    return provider


def read_answer(status: int, body: bytes, kind: type[T], url: str) -> T:
    """Return an answer of an endpoint. Raises Refused with the provider's reason, or Unavailable."""
    if status >= 400:
        try:
            refusal = msgspec.json.decode(body, type=_Refusal)
        except DECODE_ERRORS:
            raise Unavailable(f"the identity provider answered {url} with status {status}") from None
        raise Refused(refusal.error, refusal.error_description)
    return _decode(body, kind, url)


# ---- keys


class Keys:
    """The provider's public keys that may sign tokens, by their ids."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._keys = dict(keys)

    @classmethod
    def read(cls, body: bytes, url: str) -> Keys:
        """Return the usable keys of a JWKS. Raises Unavailable if there are none."""
        from joserfc.errors import JoseError
        from joserfc.jwk import JWKRegistry

        found: dict[str, Key] = {}
        given = _decode(body, dict[str, Any], url).get("keys")
        for data in given if isinstance(given, list) else ():
            if not _can_verify(data):
                continue
            try:
                found[data.get("kid", "")] = JWKRegistry.import_key(data)
            except (JoseError, ValueError, TypeError, KeyError):
                continue
        if not found:
            raise Unavailable(f"{url} has no key that can verify tokens")
        return cls(found)

    def has(self, name: str) -> bool:
        """Return whether ``find`` would find a key."""
        return name in self._keys or (not name and len(self._keys) == 1)

    def find(self, name: str) -> Key:
        """Return a key. A token without a key's id can only be of the only key. Raises UnknownKey."""
        if not self.has(name):
            raise UnknownKey(f"the token's key {shown(name)!r} is not among the issuer's: log in again")
        return self._keys[name] if name in self._keys else next(iter(self._keys.values()))


def _can_verify(data: Any) -> bool:
    """Return whether a key of a JWKS is meant for signatures, has a public part, and is long enough."""
    if not isinstance(data, dict) or data.get("use", "sig") != "sig" or data.get("kty") not in _KEY_TYPES:
        return False
    modulus = data.get("n", "") if data["kty"] == "RSA" else "A" * MIN_RSA_BITS
    is_long = isinstance(modulus, str) and len(modulus.rstrip("=")) * 6 >= MIN_RSA_BITS
    return is_long and isinstance(data.get("kid", ""), str)


# ---- tokens


def looks_like_jwt(token: str) -> bool:
    """Return whether a bearer token may be a signed JWT: a JSON object in base64, and two more parts."""
    return token.startswith("eyJ") and token.count(".") == 2


@cache
def _registry() -> JWSRegistry:
    """Return the rules for signatures. Header fields that no standard has are ignored, unless they are critical."""
    from joserfc.jws import JWSRegistry

    registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
    registry.max_header_length = MAX_HEADER_CHARS
    return registry


def _header(token: str) -> dict[str, Any]:
    """Return a token's header without proof. Raises AuthenticationError for one that is not acceptable."""
    from joserfc import jws
    from joserfc.errors import JoseError

    if len(token) > MAX_TOKEN_CHARS:
        raise AuthenticationError(f"a token of {len(token)} characters is invalid: at most {MAX_TOKEN_CHARS}")
    try:
        header = jws.extract_compact(token.encode(), registry=_registry()).headers()
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise AuthenticationError("the token is damaged: log in again") from error
    algorithm, kind = header.get("alg"), header.get("typ", "JWT")
    if algorithm not in ALGORITHMS:
        raise AuthenticationError(f"the token's algorithm {shown(str(algorithm))!r} is not accepted")
    if not isinstance(kind, str) or kind.lower() not in TOKEN_TYPES:
        raise AuthenticationError(f"a token of type {shown(str(kind))!r} is not accepted: give an ID or access token")
    return header


def key_name(token: str) -> str:
    """Return the id of the key that a token claims to be signed by; "" for none. Raises AuthenticationError."""
    name = _header(token).get("kid", "")
    if not isinstance(name, str):
        raise AuthenticationError("the token's key id is not text")
    return name


def verify(
    token: str, keys: Keys, *, issuer: str, audiences: Collection[str], now: float, skew_s: float
) -> dict[str, Any]:
    """Return the claims of an ID or access token.

    Args:
        token: The signed JWT.
        keys: Keys of the issuer.
        issuer: The only accepted ``iss``.
        audiences: The token must be for one of them.
        now: Wall seconds.
        skew_s: Seconds by which the issuer's clock may differ.

    Raises:
        UnknownKey: The token may be signed by a newer key.
        AuthenticationError: The token proves nothing.
    """
    from joserfc import jwt
    from joserfc.errors import ClaimError, ExpiredTokenError, JoseError

    header, key = _header(token), keys.find(key_name(token))
    if key.get("alg", header["alg"]) != header["alg"]:
        raise AuthenticationError(f"the token's algorithm {header['alg']} is not that of its key")
    registry = jwt.JWTClaimsRegistry(
        now=lambda: now,  # type: ignore[arg-type, return-value]  # fractions are compared all the same
        leeway=skew_s,  # type: ignore[arg-type]
        iss={"essential": True, "value": issuer},
        aud={"essential": True, "values": list(audiences)},
        exp={"essential": True},
        sub={"essential": True},
    )
    try:
        claims = jwt.decode(token, key, registry=_registry()).claims
        registry.validate(claims)
    except ExpiredTokenError as error:
        raise AuthenticationError("the token has expired: log in again") from error
    except ClaimError as error:
        raise AuthenticationError(f"the token is refused for its claim {error.claim!r}: {_CLAIM_HELP}") from error
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise AuthenticationError("the token's signature does not verify: log in again") from error
    subject = claims["sub"]
    if not subject.isprintable() or not 0 < len(subject) <= MAX_SUBJECT_CHARS:
        raise AuthenticationError("the token's subject is invalid")
    if "events" in claims:
        raise AuthenticationError("a security event is no ID or access token")
    return claims


_CLAIM_HELP = "it must come from this controller's issuer, be made for its client, and be valid now"


def check_login(claims: Mapping[str, Any], token: str, *, nonce: str, client_id: str, access_token: str) -> None:
    """Check what only the client that asked for an ID token can: nonce, party, hash. Raises AuthenticationError."""
    from authlib.oidc.core import CodeIDToken
    from joserfc.errors import JoseError

    params = {"nonce": nonce, "client_id": client_id, "access_token": access_token}
    try:
        one = CodeIDToken(dict(claims), _header(token), params=params)
        one.validate_nonce()
        one.validate_azp()
        one.validate_at_hash()
    except JoseError as error:
        raise AuthenticationError(f"the ID token does not belong to this login ({error})") from error


def claim_values(claims: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the texts of a claim: of the key ``name``, or of nested objects for a name with dots."""
    found: Any = claims.get(name)
    if found is None:
        found = claims
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, str):
        return frozenset((found,))
    return frozenset(value for value in found if isinstance(value, str)) if isinstance(found, list) else frozenset()


# ---- requests


class FormRequest(msgspec.Struct, frozen=True):
    """A POST of a form."""

    url: str
    content: str
    headers: dict[str, str]


def http_arguments(request: FormRequest | str) -> dict[str, Any]:
    """Return the arguments of httpx for the POST of a form, or for the GET of a URL."""
    if isinstance(request, str):
        return {"method": "GET", "url": request, "headers": {"Accept": "application/json"}}
    return {"method": "POST", "url": request.url, "content": request.content, "headers": request.headers}


def authorization_url(
    provider: Provider,
    *,
    client_id: str,
    redirect_uri: str,
    scopes: Sequence[str],
    state: str,
    nonce: str,
    verifier: str,
) -> str:
    """Return the address at which a person's browser begins a login, by authorization code with PKCE."""
    from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
    from authlib.oauth2.rfc7636 import create_s256_code_challenge

    url: str = prepare_grant_uri(
        _endpoint(provider, "authorization_endpoint"),
        client_id,
        "code",
        redirect_uri=redirect_uri,
        scope=" ".join(scopes),
        state=state,
        nonce=nonce,
        code_challenge=create_s256_code_challenge(verifier),
        code_challenge_method="S256",
    )
    return url


def token_request(provider: Provider, client_id: str, client_secret: str, grant: str, **fields: str) -> FormRequest:
    """Return a request to the token endpoint for ``grant``, such as ``authorization_code``."""
    from authlib.oauth2.rfc6749.parameters import prepare_token_request

    body = prepare_token_request(grant, **fields)
    return _form(_endpoint(provider, "token_endpoint"), body, provider, client_id, client_secret)


def device_request(provider: Provider, client_id: str, scopes: Sequence[str]) -> FormRequest:
    """Return a request for a code that a person enters in a browser elsewhere."""
    from authlib.common.urls import url_encode

    body = url_encode([("scope", " ".join(scopes))])
    return _form(_endpoint(provider, "device_authorization_endpoint"), body, provider, client_id, "")


def revocation_request(provider: Provider, client_id: str, refresh_token: str) -> FormRequest:
    """Return a request that ends a refresh token."""
    from authlib.common.urls import url_encode

    body = url_encode([("token", refresh_token), ("token_type_hint", "refresh_token")])
    return _form(_endpoint(provider, "revocation_endpoint"), body, provider, client_id, "")


def _form(url: str, body: str, provider: Provider, client_id: str, client_secret: str) -> FormRequest:
    from authlib.oauth2.auth import ClientAuth

    method = "none"
    if client_secret:
        basic = "client_secret_basic"
        methods = provider.token_endpoint_auth_methods_supported
        method = basic if basic in methods or "client_secret_post" not in methods else "client_secret_post"
    headers = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
    _, headers, body = ClientAuth(client_id, client_secret, method).prepare("POST", url, headers, body)
    return FormRequest(url, body, headers)


def _endpoint(provider: Provider, name: str) -> str:
    url: str = getattr(provider, name)
    if not url:
        raise ConfigurationError(f"the identity provider {provider.issuer} has no {name}")
    return url
