"""The file system that a URL names, as fsspec has it: by the package that fsspec knows for it (s3fs, gcsfs, adlfs), or
by obstore where that is not installed.

obstore is one package without dependencies of its own; s3fs brings botocore, which does not install beside some others
(docs/decisions/0047).
"""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

_ERRORS = {"obstore.exceptions": "BaseError", "botocore.exceptions": "BotoCoreError", "aiohttp": "ClientError"}
"""Of packages below fsspec, what they raise that is no OSError where a storage fails."""


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system, and the path in it. Raises ImportError where a package is missing, ValueError for a URL that
    nobody knows."""
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
    """What is raised where a storage fails: OSError, and what the packages that are in use have for it besides."""
    used = ((sys.modules[module], name) for module, name in _ERRORS.items() if module in sys.modules)
    return OSError, *(getattr(module, name) for module, name in used)
