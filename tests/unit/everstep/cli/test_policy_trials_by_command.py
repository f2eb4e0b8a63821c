"""``everstep policy try`` asks every controller, since each recorded the decisions of its own lead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep.client import exchange
from tests.support.fleet.fake_controllers import UNREACHABLE, Answer, FakeControllers, standby_answer


@pytest.fixture
def controllers() -> Iterator[FakeControllers]:
    made = FakeControllers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LEADER_PAUSE_S", 0.0)


def recorded(epoch: int, *left: str) -> Answer:
    """A trial's outcome: under the change these nodes would not have left while the controller led."""
    at = 3600.0 * epoch
    result = {"since": at, "events": 5, "evictions": 1, "spans": [{"begins_at": at, "ends_at": at + 3599.0}]}
    result["spans"][0]["epoch"] = epoch  # type: ignore[index]
    return lambda: (200, result | {"avoided_evictions": [f"verdict {node}-1 (evict): {node}: XID 79" for node in left]})


def try_policy(tmp_path: Path, *addresses: str) -> Result:
    token, change = tmp_path / "token", tmp_path / "change.toml"
    token.write_text("token")
    change.write_text("[policy.budget]\ncount = 2\n")
    words = ["--controller", ",".join(addresses), "--token-file", str(token), "policy", "try", str(change)]
    return CliRunner().invoke(app, words, terminal_width=200)


def test_policy_try_asks_every_controller(controllers: FakeControllers, tmp_path: Path) -> None:
    addresses = [controllers.add(recorded(8, "n3")), controllers.add(recorded(7, "n2"))]
    done = try_policy(tmp_path, *addresses)
    assert done.exit_code == 0, done.output
    assert sorted(controllers.requests) == ["c0", "c1"]
    words = " ".join(done.output.split())
    assert "10 events decided again; it would have evicted 2 times; 2 evictions would not have been" in words
    assert words.index("verdict n2-1") < words.index("verdict n3-1")


def test_policy_try_names_unreachable_controller(controllers: FakeControllers, tmp_path: Path) -> None:
    done = try_policy(tmp_path, UNREACHABLE, controllers.add(recorded(7)))
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "it would have evicted once, as happened; http://127.0.0.1:1 is not counted: no controller answers" in words


def test_policy_try_with_one_address_follows_the_leader(controllers: FakeControllers, tmp_path: Path) -> None:
    leader = controllers.add(recorded(7))
    done = try_policy(tmp_path, controllers.add(standby_answer(leader)))
    assert done.exit_code == 0, done.output
    assert controllers.requests == ["c1", "c0"]
