"""The launcher's messages and receipt at the end of a run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.client import Client
from everstep.clock import ManualClock
from everstep.receipts.receipt_files import stored_receipts
from everstep.wire.v1.receipts import JobReceipt
from everstep_trainer.launch.run_receipt import concluded, report_run
from everstep_trainer.launch.services.private_services import PrivateServices
from tests.support.fleet.receipts import full_receipt, receipt, recovery


class Services(PrivateServices):
    """Services whose controller answers with a receipt, or not at all."""

    def __init__(self, directory: Path, answer: JobReceipt | None, *, has_controller: bool = True) -> None:
        super().__init__(directory, "llama", ManualClock(), None)
        self.answer, self.asked = answer, dict[str, Any]()
        self._has_controller = has_controller

    @property
    def has_controller(self) -> bool:
        return self._has_controller

    async def ask(self, request: Any) -> Any:
        request(self)
        return self.answer

    def receipt(self, job: str, **query: Any) -> None:
        self.asked = {"job": job, **query}


def play(services: Services, directory: Path, exit_status: int | None, sentence: str = "over") -> None:
    asyncio.run(report_run(services, "llama", directory, exit_status=exit_status, sentence=sentence, now=5.0))


def test_receipt_is_printed_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    services = Services(tmp_path, full_receipt())
    play(services, tmp_path, 0)
    assert services.asked == {"job": "llama", "until": None}
    (stored,) = stored_receipts(tmp_path)
    assert (stored.receipt.result, stored.receipt.sentence) == ("finished", "over")
    assert "job llama finished at step 900: 2 recoveries" in caplog.text
    assert f"receipt: {stored.page}" in caplog.text


def test_interruption_omits_its_consequences(tmp_path: Path) -> None:
    services = Services(tmp_path, receipt(result="running"))
    play(services, tmp_path, None, "interrupted")
    assert services.asked["until"] == 5.0
    assert [entry.receipt.result for entry in stored_receipts(tmp_path)] == ["interrupted"]


def test_other_nodes_print_but_keep_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    play(Services(tmp_path, receipt(), has_controller=False), tmp_path, 0)
    assert "0 recoveries" in caplog.text
    assert stored_receipts(tmp_path) == []


def test_unresponsive_controller_costs_only_the_receipt(tmp_path: Path) -> None:
    play(Services(tmp_path, None), tmp_path, 0)
    assert stored_receipts(tmp_path) == []

    class Unreachable(PrivateServices):
        def _client(self) -> Client:
            return Client("http://127.0.0.1:9", "a.token")

    services = Unreachable(tmp_path, "llama", ManualClock(), None)
    services._serves = True
    assert asyncio.run(services.ask(lambda client: client.receipt("llama"))) is None


def test_unwritable_folder_costs_only_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "receipts").touch()
    play(Services(tmp_path, receipt()), tmp_path, 0)
    assert "the receipt cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("reported", "exit_status", "result"),
    [
        ("running", 1, "failed"),
        ("running", 0, "finished"),
        ("running", None, "interrupted"),
        ("finished", None, "finished"),
        ("finished", 1, "failed"),
    ],
)
def test_result_is_the_launchers(reported: Any, exit_status: int | None, result: str) -> None:
    assert concluded(receipt(result=reported), exit_status, "why").result == result


def test_versions_in_memory_are_not_kept() -> None:
    (stored,) = full_receipt().versions
    in_memory = msgspec.structs.replace(stored, storage_tier="memory", url="")
    made = receipt(recovery(2, 1.0, 1.0), versions=(in_memory, stored))
    assert concluded(made, 0, "over").versions == (stored,)
