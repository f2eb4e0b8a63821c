"""What the command lines of the programs refuse."""

from __future__ import annotations

import pytest
import typer

from tests.support.command_lines import parse


@pytest.mark.parametrize(
    ("program", "arguments", "meant"),
    [
        ("everstep-agent", ["--power", "p1"], "--power-domain"),
        ("everstep-launch", ["--max-restart", "3", "train.py"], "--max-restarts"),
        ("everstep-controller", ["serve", "--data-base", "sqlite:///x"], "--database"),
    ],
)
def test_abbreviated_flag_is_refused_and_named(program: str, arguments: list[str], meant: str) -> None:
    with pytest.raises(typer.exceptions.TyperException) as refused:
        parse(program, arguments)
    assert next(word for word in arguments if word.startswith("--")) in refused.value.format_message()
    assert meant in refused.value.format_message()
