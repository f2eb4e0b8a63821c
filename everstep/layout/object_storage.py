"""Open the fsspec file system that a URL names: with fsspec's own package (s3fs, gcsfs, adlfs), or with obstore.

obstore is one package without dependencies. s3fs needs botocore, which conflicts with some other packages
(docs/decisions/0028).
"""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

_ERRORS = {"obstore.exceptions": "BaseError", "botocore.exceptions": "BotoCoreError", "aiohttp": "ClientError"}
"""Errors of packages below fsspec that signal failing storage and are no OSError."""


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the file system, and the path in it. Raises ImportError for a missing package, ValueError for a scheme."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as missing:
        try:
            from obstore.fsspec import SUPPORTED_PROTOCOLS, register
        except ImportError:
            raise missing from None
        scheme = urlsplit(url).scheme
        if scheme not in SUPPORTED_PROTOCOLS:
            raise
        register(scheme)
        filesystem, path = fsspec.core.url_to_fs(url)
    return filesystem, path


def storage_errors() -> tuple[type[Exception], ...]:
    """Return the errors of failing storage: OSError, and those of the packages in use."""
    used = ((sys.modules[module], name) for module, name in _ERRORS.items() if module in sys.modules)
    return OSError, *(getattr(module, name) for module, name in used)
