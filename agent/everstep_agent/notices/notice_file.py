"""The site's own notice: a file ``notice.json`` in the run directory, which a script writes and removes.

``{"reason": "node reserved for firmware", "deadline": "2026-05-04T06:00:00Z"}``; without ``deadline`` it holds at once.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from everstep_agent.notices.notice import Notice, NoticeError, clip, decode_json, parse_time

FILE_NAME = "notice.json"
MAX_FILE_BYTES = 4096
EXPIRY_S = 900.0
"""Seconds after its deadline at which a file is ignored, because its writer did not remove it."""


def read_notice_file(path: Path, now: float) -> list[Notice]:
    """Return the notice in the file. Raises NoticeError if it cannot be understood."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NoticeError(str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoticeError("not a plain file")
        body = os.read(descriptor, MAX_FILE_BYTES)
    finally:
        os.close(descriptor)
    found = decode_json(body)
    if not isinstance(found, dict) or not isinstance(found.get("reason"), str):
        raise NoticeError('expected {"reason": "...", "deadline": "2026-05-04T06:00:00Z"}')
    deadline = None if found.get("deadline") is None else parse_time(found["deadline"])
    if deadline is not None and now > deadline + EXPIRY_S:
        return []
    message = f"the site announces: {clip(found['reason'])}"
    return [Notice(subject=f"file/{FILE_NAME}", message=message, deadline=deadline, is_scheduled=True)]
