"""Run the hooks' code once in a standby, on a model of a few numbers, so that a recovery finds it warm.

A forked process copies each page that it is the first to write, and the interpreter writes to all code that it runs.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from everstep.layout.manifests import decode_manifest, encode_manifest
from everstep_trainer.restore.overwrites import RestoredValues
from everstep_trainer.sdc.replay.units import find_units
from everstep_trainer.slots.fetch import NeededBox, plan_reads
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.layout import decode_layout, encode
from everstep_trainer.state.tracked_state import TrackedState
from everstep_trainer.state.untracked_state import check_untracked

log = logging.getLogger(__name__)

BLOB_BYTES = 4096
"""Room for Python state in the manifest."""


def warm_up_tracking() -> None:
    """Do in memory what ``run.track`` does, for two ranks of one node. Raises nothing, and leaves nothing behind."""
    try:
        trained, fresh = _tiny_state(has_stepped=True), _tiny_state(has_stepped=False)
        layout = decode_layout(encode(trained.layout(trained.tensors(), rank=0, world=2)))
        shares = divide_state([layout, layout], ["node", "node"], replicas=1)
        built = [build_manifest(rank, [layout, layout], shares[rank], BLOB_BYTES, digests=True) for rank in range(2)]
        manifests = [decode_manifest(encode_manifest(manifest)) for manifest in built]
        targets = fresh.restore_targets(manifests[0].catalog)
        plan_reads([NeededBox(index, target.box) for index, target in targets], manifests)
        trained.capture()
        RestoredValues(trained).overwritten()
    except Exception:  # a recovery then takes some milliseconds longer
        log.debug("the hooks cannot be warmed up", exc_info=True)


def _tiny_state(*, has_stepped: bool) -> TrackedState:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        if has_stepped:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    objects = {"model": model, "optimizer": optimizer}
    check_untracked(objects)
    find_units(objects)
    return TrackedState(objects)
