from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.integration_kills import EXAMPLES, SCRIPTS, Final, Process, _compare, choose, measure
from bench.kills.style import STYLES, digest


def test_styles_are_described() -> None:
    assert len(STYLES) >= 16
    assert all(one.sentence.endswith(".") and 2 <= one.ranks <= 4 for one in STYLES.values())


def test_choose_takes_patterns_and_all_styles_without_them() -> None:
    assert choose([]) == list(STYLES)
    assert choose(["gan", "example/dcp"]) == ["gan", "example/dcp"]
    assert choose(["example/*"]) == [f"example/{name}" for name in EXAMPLES]
    assert choose(["nothing"]) == []


def test_example_scripts_exist() -> None:
    scripts = [Path(SCRIPTS[name].arguments[0]) for name in choose(["example/*"])]
    assert all(script.is_file() for script in scripts)


def test_digest_sees_each_bit_and_number() -> None:
    def state(weight: float, lr: float, key: str) -> dict[str, object]:
        return {key: torch.tensor([1.0, weight]), "groups": [{"lr": lr}]}

    one = digest(state(0.0, 0.1, "a"))
    assert one == digest(state(0.0, 0.1, "a"))
    assert len({one, digest(state(-0.0, 0.1, "a")), digest(state(0.0, 0.2, "a")), digest(state(0.0, 0.1, "b"))}) == 4


def test_comparison_says_what_differs() -> None:
    right, other = Final(9, "", "a" * 16), Final(9, "", "b" * 16)
    assert _compare("gan", 6, 6, right, right).exact == "yes"
    assert _compare("gan", 6, 5, right, right).text == "the run was over before the last kill"
    differs = _compare("gan", 6, 6, right, other)
    assert differs.exact == "no"
    assert "b" * 16 in differs.text


def test_steps_again_are_those_that_were_finished(tmp_path: Path) -> None:
    run = Process("gan", 9, tmp_path, is_paced=True)
    steps = {0: [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (3, 2)], 1: [(1, 1), (1, 2), (2, 3), (3, 2)]}
    for rank, begun in steps.items():
        lines = [json.dumps(one) for one in begun]
        (tmp_path / "notes" / f"steps-{rank}-7.jsonl").write_text("\n".join([*lines, "[3,"]))
    assert run.position() == (3, 2)
    assert run.ranks() == {0: 7, 1: 7}
    assert run.steps_again() == 2  # step 3 was not finished in generation 1; 2 and 3 were in generation 2


@pytest.mark.slow
def test_killed_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    outcome = measure("replicate", 1, 1, tmp_path)
    assert (outcome.exact, outcome.kills) == ("yes", 1), outcome.text
    assert outcome.again is not None
    assert "final step=" in (tmp_path / "replicate-killed.log").read_text()
