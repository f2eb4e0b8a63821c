"""Control characters in text of other machines, by Unicode's own tables."""

from __future__ import annotations

import unicodedata

import msgspec
import pytest

from everstep.printable_text import escape_control, printable_json, valid_unicode

HARMFUL = [
    chr(code)
    for code in range(0x10000)
    if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")
    or unicodedata.bidirectional(chr(code)) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    or code in (0x200E, 0x200F, 0x061C)
]
"""All control characters, ends of lines and paragraphs, and Unicode's Bidi_Control."""


def test_controls_are_replaced_in_text() -> None:
    shown = escape_control("".join(HARMFUL) + "Grüße, 你好, שלום, 🙂")
    assert shown == "".join("\n" if character == "\n" else "\ufffd" for character in HARMFUL) + "Grüße, 你好, שלום, 🙂"


@pytest.mark.parametrize("indent", [0, 2])
def test_json_has_no_raw_controls_and_loses_nothing(indent: int) -> None:
    message = {"text": "".join(HARMFUL) + "Grüße \\u009b", "".join(HARMFUL): [1]}
    shown = printable_json(message, indent=indent)
    assert set(shown) & set(HARMFUL) <= {"\n"}
    assert "Grüße" in shown
    assert msgspec.json.decode(shown) == message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Grüße, 你好", "Grüße, 你好"),
        ("Gr\udcc3\udcbc\udcc3\udc9fe", "Grüße"),  # a name in UTF-8 that was decoded as ASCII
        ("Gr\udcfc", "Gr\ufffd"),  # a name in Latin-1
        ("\ud800", "\\ud800"),
    ],
)
def test_text_is_made_valid_unicode(text: str, expected: str) -> None:
    assert valid_unicode(text) == expected
