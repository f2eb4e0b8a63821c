"""Lines of Everstep in a rank's stderr are recognised wherever reads divide them."""

from __future__ import annotations

import itertools
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_trainer.launch.output.marks import (
    KEPT_MARK,
    OUTPUT_VARIABLE,
    SHOWN_MARK,
    LastResort,
    MarkReader,
    OutputPart,
    identity,
    keep_line,
    show_line,
    shown_stderr,
)

OUTPUT = b"\r10%" + SHOWN_MARK + b"one\n" + b"\x1e{}\n\x1e\x1f" + KEPT_MARK + b"two\nplain\x1e"


def joined(pieces: list[OutputPart]) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    for mark, data in pieces:
        is_more = found and found[-1][0] == mark and not (mark and found[-1][1].endswith(b"\n"))
        if is_more:
            found[-1] = mark, found[-1][1] + data
        else:
            found.append((mark, data))
    return found


@given(st.lists(st.integers(0, len(OUTPUT)), max_size=8))
def test_marked_lines_are_found_across_any_cuts(cuts: list[int]) -> None:
    reader, pieces = MarkReader(), []
    places = [0, *sorted(cuts), len(OUTPUT)]
    for start, end in itertools.pairwise(places):
        pieces += reader.feed(OUTPUT[start:end])
    assert joined(pieces) == [
        (b"", b"\r10%"),
        (SHOWN_MARK, b"everstep: one\n"),
        (b"", b"\x1e{}\n\x1e\x1f"),
        (KEPT_MARK, b"everstep: two\n"),
        (b"", b"plain"),
    ]
    assert reader.rest() == b"\x1e"


def copy_stderr(monkeypatch: pytest.MonkeyPatch, own: str = "") -> None:
    monkeypatch.setenv(OUTPUT_VARIABLE, f"7:7 {own or identity(2)}")
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)


def test_warning_is_marked_in_a_copied_stderr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_stderr(monkeypatch)
    handler = LastResort(logging.NullHandler())
    handler.handle(logging.LogRecord("everstep_trainer.x", logging.WARNING, "", 0, "is %d", (3,), None))
    handler.handle(logging.LogRecord("other", logging.WARNING, "", 0, "not ours", (), None))
    show_line("interrupted")
    assert keep_line("a list")
    assert (
        capfd.readouterr().err.encode()
        == SHOWN_MARK + b"is 3\n" + SHOWN_MARK + b"interrupted\n" + KEPT_MARK + b"a list\n"
    )
    assert shown_stderr() == "7:7"
