"""Look at the start for checkpoints of the job on storage, and say from which one it continues."""

from __future__ import annotations

import logging

from everstep.layout.stored_checkpoints import find_stored_run
from everstep.wire.v1.training import EarlierRun, StoredVersion
from everstep_trainer.launch.options import LaunchOptions

log = logging.getLogger(__name__)


def find_earlier_run(options: LaunchOptions) -> EarlierRun | None:
    """Return what earlier runs of the job left at ``--spill-to``, and say so in a line; None without the flag.

    Raises ConfigurationError or Unavailable if the storage cannot be listed.
    """
    root = options.spill_to
    if root is None:
        return None
    found = find_stored_run(root, options.job, fresh=options.fresh)
    folder = f"{root.rstrip('/')}/{found.folder}"
    if not found.checkpoints:
        why = "starts anew and" if options.fresh else "has no checkpoint on storage yet and"
        log.info("job %s %s writes to %s", options.job, why, folder)
    else:
        version, url, _ = found.checkpoints[0]
        unused = "; --start-from is not used" if options.start_from is not None else ""
        message = "job %s continues from step %d in %s, unless memory has a newer version%s (--fresh starts anew)"
        log.info(message, options.job, version.step, url, unused)
    return EarlierRun(
        folder=found.folder,
        versions=tuple(StoredVersion(version=one, url=url, written_at=at) for one, url, at in found.checkpoints),
        generation=found.generation,
        fresh=options.fresh,
    )
