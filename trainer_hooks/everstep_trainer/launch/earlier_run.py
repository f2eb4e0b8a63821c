"""Look at the start for checkpoints of the job on storage, and describe the start in one line."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.layout.stored_checkpoints import find_stored_run
from everstep.receipts.text import format_count
from everstep.wire.v1.training import EarlierRun, JobSpec, StoredVersion
from everstep_trainer.launch.options import LaunchOptions


def find_earlier_run(options: LaunchOptions) -> EarlierRun | None:
    """Return what earlier runs of the job left at ``--spill-to``; None without the flag.

    Raises ConfigurationError or Unavailable if the storage cannot be listed.
    """
    root = options.checkpoints.spill_to
    if root is None:
        return None
    found = find_stored_run(root, options.job, fresh=options.checkpoints.fresh)
    return EarlierRun(
        folder=found.folder,
        versions=tuple(
            StoredVersion(version=checkpoint, url=url, written_at=at) for checkpoint, url, at in found.checkpoints
        ),
        generation=found.generation,
        fresh=options.checkpoints.fresh,
    )


def describe_start(
    options: LaunchOptions, spec: JobSpec, earlier: EarlierRun | None, watch: str, environ: Mapping[str, str]
) -> str:
    """Return the one line that a launcher shows before the script's own.

    Args:
        options: Of the launch.
        spec: The job, with its counted ranks.
        earlier: What is on storage.
        watch: The command that shows the job.
        environ: The launcher's environment.
    """
    ranks = format_count(spec.nproc_per_node, "rank") + (" on this node" if options.max_nodes > 1 else "")
    if spec.nproc_per_node > 1 and "OMP_NUM_THREADS" not in environ:
        ranks += ", OMP_NUM_THREADS=1"
    return f"job {options.job}, {ranks}{_describe_storage(options, earlier)}; to watch: {watch}"


def _describe_storage(options: LaunchOptions, earlier: EarlierRun | None) -> str:
    if earlier is None:
        return ""
    if earlier.versions:
        newest = earlier.versions[0]
        unused = "; --start-from is not used" if options.start_from is not None else ""
        place = f"; it continues from step {newest.version.step} in {newest.url}, unless memory has a newer version"
        return f"{place} (--fresh starts anew){unused}"
    assert options.checkpoints.spill_to is not None
    start = "; it starts anew and" if options.checkpoints.fresh else "; it"
    return f"{start} writes to {options.checkpoints.spill_to.rstrip('/')}/{earlier.folder}"
