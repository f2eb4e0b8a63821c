"""Measure what harm audits and the controller's judge do to honest programs."""

from __future__ import annotations

from bench.calm.audited_training import train
from bench.calm.honest_judge import Sentence, judge
from bench.calm.honest_programs import HONEST, Honest
from bench.table import Row
from everstep.wire.v1.training import SdcPreset

PRESET: SdcPreset = "standard"


class HonestRows:
    """Measures honest programs, and adds up their harm."""

    def __init__(self) -> None:
        self._sentences: dict[str, Sentence] = {}

    def measure(self, program: Honest) -> list[Row]:
        """Train one program under audits, and return its row."""
        record = train(program.name, PRESET)
        said = sum(map(len, record.statements.values()))
        sentence = judge(record)
        if record.failure:
            last = record.failure.strip().splitlines()[-1]
            sentence = Sentence(sentence.strikes, sentence.evictions, True, sentence.regroups, f"the run ended: {last}")
        self._sentences[program.name] = sentence
        harms = sentence.strikes + sentence.evictions + sentence.failed
        against = f"{record.steps} steps, {said} statements, {sentence.regroups} regroups; {sentence.words}"
        return [Row(f"honest/{program.name}", harms, "harms", 0, 0, against[:400])]

    def totals(self) -> list[Row]:
        """Return the sums over all programs that were run."""
        found = self._sentences.values()
        if not found:
            return []
        harmed = sum(bool(result.strikes or result.evictions or result.failed) for result in found)
        return [
            Row(f"honest: programs harmed, of {len(found)}", harmed, "programs", 0, 0),
            Row("honest: strikes", sum(result.strikes for result in found), "", 0, 0),
            Row("honest: evictions", sum(result.evictions for result in found), "", 0, 0),
            Row("honest: jobs failed", sum(result.failed for result in found), "", 0, 0),
            Row("honest: regroups", sum(result.regroups for result in found), "", 0, 0),
        ]


__all__ = ["HONEST", "HonestRows"]
