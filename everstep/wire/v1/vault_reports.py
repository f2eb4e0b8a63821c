"""What became of the controller's orders to a node's vault: versions to storage, parity of versions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.ids import Rank, Version, Whole
from everstep.wire.v1.base import Report, ShortText

_NUMBERED = msgspec.Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$"}})
"""Of a dictionary whose keys are numbers: JSON has text for them, and msgspec's schema does not say which."""


class VersionSpilled(Report, frozen=True, kw_only=True, tag=True):
    """What became of a node's part of ``SpillVersion``, the order's ``attempt`` said again.

    With an error's ``code`` it was not written, for the reason in ``message``. Else it is on storage in the folder at
    ``url``; ``whole``: so is all the rest, and the checkpoint can be loaded; ``removed``: names of older folders;
    ``left``: of all that are whole, where only so many stay (who removed one may be lost with the word of it).
    """

    version: Version
    attempt: Whole
    url: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    bytes: Whole = 0
    whole: bool = False
    removed: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ()
    left: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ()
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: ShortText = ""


class VersionProtected(Report, frozen=True, kw_only=True, tag=True):
    """What became of ``ProtectVersion`` on a home of parity.

    ``made``: by group, as what its members were sealed when P or Q was made of them; with an error's ``code``, for the
    reason in ``message``, not all groups of the order are there.
    """

    version: Version
    made: Annotated[dict[Rank, Annotated[str, msgspec.Meta(max_length=64)]], _NUMBERED] = {}
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: ShortText = ""
