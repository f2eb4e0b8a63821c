"""Print the receipt of a run, and keep it if its private controller is about to end."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from everstep.receipts.receipt_files import store_receipt
from everstep.receipts.text import summary_lines
from everstep.wire.v1.receipts import JobReceipt, ReceiptResult
from everstep_trainer.launch.services.fleet_access import FleetAccess
from everstep_trainer.launch.services.private_services import PrivateServices

log = logging.getLogger(__name__)


async def report_run(
    private: PrivateServices, job: str, state_dir: Path, *, exit_status: int | None, sentence: str, now: float
) -> None:
    """Print what the job did and what failures cost, and keep it in ``state_dir`` if the controller runs here.

    Args:
        private: The run's services. Without a controller, or without a job in it, nothing happens.
        job: Name of the job.
        state_dir: Folder of the launcher's files.
        exit_status: The launcher's exit status; None if a signal interrupts it.
        sentence: Why the launcher ends.
        now: Wall seconds. What follows from an interruption is no failure of the run, and is left out.
    """
    if exit_status is None and not private.has_controller:
        return
    until = None if exit_status is not None else now
    receipt = await private.ask(lambda client: client.receipt(job, until=until))
    if receipt is None:
        return
    receipt = concluded(receipt, exit_status, sentence)
    for line in summary_lines(receipt):
        log.info("%s", line)
    if not private.has_controller:
        return
    try:
        stored = store_receipt(state_dir, receipt)
    except OSError as error:
        log.warning("the receipt cannot be written: %s", error)
    else:
        log.info("receipt: %s (everstep runs lists all)", stored.page)


async def report_fleet_run(fleet: FleetAccess, job: str) -> None:
    """Print what a fleet's job did and what failures cost, if it is over and rank 0 was here; else how to ask for it.

    Args:
        fleet: The access to the fleet's controllers, which keep the receipt.
        job: Name of the job.
    """
    receipt = await fleet.ask(lambda client: client.receipt(job))
    if receipt is None or receipt.result == "running":
        log.info("steps and recoveries of job %s: everstep job show %s", job, job)
        log.info("what failures cost: everstep job receipt %s --html FILE", job)
        return
    for line in summary_lines(receipt):
        log.info("%s", line)
    log.info("receipt as a page: everstep job receipt %s --html FILE", job)


def concluded(receipt: JobReceipt, exit_status: int | None, sentence: str) -> JobReceipt:
    """Return the controller's receipt with the launcher's result; checkpoints in memory end with the launcher."""
    result: ReceiptResult = "interrupted" if exit_status is None else "failed" if exit_status else "finished"
    if result == "interrupted" and receipt.result != "running":
        result = receipt.result  # the job was over when the signal came
    kept = tuple(version for version in receipt.versions if version.storage_tier == "storage")
    return msgspec.structs.replace(receipt, result=result, sentence=sentence or receipt.sentence, versions=kept)
