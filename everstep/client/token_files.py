"""Read bearer tokens from files."""

from __future__ import annotations

from pathlib import Path

from everstep.bearer_tokens import looks_like_token
from everstep.errors import ConfigurationError


def read_token(path: str) -> str:
    """Return the token in a file. Raises ConfigurationError if there is none."""
    if not path:
        raise ConfigurationError(
            "no token: give --token-file or EVERSTEP_TOKEN_FILE; an operator of the controller makes one with "
            "`everstep-controller token --role viewer --subject YOU --secret-file F > token`"
        )
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file {path!r} cannot be read: {error}") from error
    if not token:
        raise ConfigurationError(f"the token file {path!r} is empty")
    if not looks_like_token(token):
        raise ConfigurationError(f"{path!r} does not contain a token (one word on one line): check --token-file")
    return token
