"""Transcripts: prose that says what is proved, commands, and the decisions they lead to.

A line that begins with ``>`` is a command, the lines below it are what the core decided; ``> quietly ...`` leaves
these out. Everything before the first command is prose. After ``> take-over`` there are two controllers: commands are
for the new one, and those that begin with ``old`` for the one that does not know yet that it was followed.
"""

from __future__ import annotations

import msgspec

from everstep.errors import EverstepError
from everstep_controller.core.effects import describe
from tests.scenarios.commands import COMMANDS, Options, Words, followed
from tests.support.fleet.core_fleet import CoreFleet

OLD, QUIETLY, TAKE_OVER = "old", "quietly", "take-over"


class Command(msgspec.Struct, frozen=True):
    """One line of a transcript, taken apart."""

    line: str
    quiet: bool
    old: bool
    verb: str
    words: Words
    options: Options


def rewritten(text: str) -> str:
    """The transcript with the decisions as they are today."""
    prose, commands = parsed(text)
    world, out = _World(), []
    for command in commands:
        lines = world.run(command) or ["nothing"]
        out.append("\n".join([f"> {command.line}", *([] if command.quiet else lines)]))
    return prose + "\n" + "\n\n".join(out) + "\n"


def parsed(text: str) -> tuple[str, list[Command]]:
    """The prose, and the commands after it."""
    head = text.index("\n> ") + 1
    lines = [line[2:] for line in text[head:].splitlines() if line.startswith("> ")]
    return text[:head].rstrip() + "\n", [_command(line) for line in lines]


def _command(line: str) -> Command:
    words = line.split()
    modes = []
    while words[0] in (OLD, QUIETLY):
        modes.append(words.pop(0))
    options = dict(word.split("=", 1) for word in words if "=" in word)
    plain = [name for word in words[1:] if "=" not in word for name in _names(word)]
    return Command(line, QUIETLY in modes, OLD in modes, words[0], plain, options)


def _names(word: str) -> Words:
    """``n2..n4`` is ``n2 n3 n4``."""
    first, dots, last = word.partition("..n")
    if not dots:
        return [word]
    return [f"n{number}" for number in range(int(first[1:]), int(last) + 1)]


class _World:
    """The controllers, and the decisions after the newest command."""

    def __init__(self) -> None:
        self._fleet = CoreFleet()
        self._old: CoreFleet | None = None

    def run(self, command: Command) -> Words:
        """The decisions, or why it was refused."""
        if command.verb == TAKE_OVER:
            self._old, self._fleet = self._fleet, followed(self._fleet)
            return []
        fleet = self._old if command.old else self._fleet
        assert fleet is not None, "`old` needs a second controller: use take-over first"
        before = len(fleet.effects)
        try:
            output = COMMANDS[command.verb](fleet, command.words, command.options)
        except EverstepError as error:
            return [f"refused ({error.code}): {error}"]
        answers = output if isinstance(output, list) and all(isinstance(line, str) for line in output) else []
        return [*describe(fleet.effects[before:]), *answers]
