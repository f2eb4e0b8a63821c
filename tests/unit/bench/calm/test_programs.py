"""The catalogues of programs."""

from __future__ import annotations

from bench.calm.__main__ import QUICK, Measure, choose
from bench.calm.hang_programs import HANGS
from bench.calm.honest_programs import HONEST
from bench.calm.programs import PROGRAMS


def test_programs_are_described_and_named_once() -> None:
    assert len(PROGRAMS) >= 40
    assert len(HONEST) >= 37
    names = [*PROGRAMS, *HANGS]  # a rank finds its program by the name alone
    assert len(set(names)) == len(names)
    sentences = [one.sentence for one in (*PROGRAMS.values(), *HONEST.values())]
    assert all(sentence.endswith(".") for sentence in sentences)
    assert set(QUICK) <= {f"calm/{name}" for name in PROGRAMS}


def test_program_under_audits_keeps_all_else() -> None:
    plain, audited = PROGRAMS["gan"], PROGRAMS["gan_under_standard"]
    assert audited.options == ("--sdc", "standard")
    assert (audited.train, audited.effects) == (plain.train, plain.effects)


def test_choose_takes_patterns_and_all_without_them() -> None:
    measures = [Measure(name, list) for name in ("calm/gan", "hang/endless_sleep")]
    assert choose(measures, []) == measures
    assert [one.name for one in choose(measures, ["hang/*"])] == ["hang/endless_sleep"]
    assert choose(measures, ["nothing"]) == []
