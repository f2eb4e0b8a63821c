"""Directives as the frames of a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from controller.api import asgi
from controller.push import Encoded, Outgoing
from everstep.wire.v1.session import NUMBER_BYTES, PREFIX_BYTES, Frame, encode_frame


class _Directives(msgspec.Struct, frozen=True):
    """``DirectivesAnswer`` over encoded directives."""

    directives: tuple[Encoded, ...]


def frames_of(directives: Sequence[Outgoing]) -> Iterator[tuple[bytes, ...]]:
    """The parts of each frame, in order. What is small goes together, what is large by itself."""
    small: list[Outgoing] = []
    for one in directives:
        if one.body.is_large:
            if small:
                yield _together(small)
                small = []
            yield _alone(one)
        else:
            small.append(one)
    if small:
        yield _together(small)


def _together(directives: list[Outgoing]) -> tuple[bytes]:
    if len(directives) == 1:  # a notice to a whole job, mostly
        (one,) = directives
        return (encode_frame(Frame.PUSH, b'{"directives":[{"seq":%d,"body":%b}]}' % (one.seq, one.body.json)),)
    return (encode_frame(Frame.PUSH, asgi.encode(_Directives(tuple(one.encoded() for one in directives)))),)


def _alone(one: Outgoing) -> tuple[bytes, bytes]:
    """The number, and the deflated body that all receivers share: it is not copied."""
    deflated = one.body.deflated
    length = (1 + NUMBER_BYTES + len(deflated)).to_bytes(PREFIX_BYTES, "big")
    return length + bytes((Frame.DEFLATED_PUSH,)) + one.seq.to_bytes(NUMBER_BYTES, "big"), deflated
