"""Where checkpoints may be stored, as people name it: paths and URLs that say nothing secret."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

_SECRET_WORDS = ("secret", "token", "key", "password", "passwd", "signature", "sig", "credential")


def why_not_storage(url: str) -> str:
    """Why a job cannot have its checkpoints written to ``url``, with the mend; empty where it can.

    What is told to a controller is stored, logged and shown. So credentials have no place in it, and are not repeated
    in what is said here: the processes that read and write storage take them from their own surroundings.
    """
    if "://" not in url:
        if url.startswith("/"):
            return ""
        return f"{url!r} is neither an absolute path nor a URL: every node reads it from where it is itself"
    parts = urlsplit(url)
    if "@" in parts.netloc or any(word in name.lower() for name, _ in parse_qsl(parts.query) for word in _SECRET_WORDS):
        return (
            f"the {parts.scheme} URL has credentials in it, which would be stored and shown: leave them out, and give "
            "them to agents and trainers by their environment or files, as the storage's own tools take them"
        )
    if parts.query or parts.fragment:
        return f"the {parts.scheme} URL has a query or a fragment: name a folder"
    return ""
