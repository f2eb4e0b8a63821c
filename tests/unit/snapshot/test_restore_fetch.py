"""What is sent for in which order, with a vault that only listens."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from everstep.boxes import whole
from everstep.errors import Unavailable
from everstep.ids import Version
from everstep.manifests import LAYOUT_FORMAT, Manifest, Stored, Tensor
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import Member
from trainer_hooks.dcp.reader import Destination
from trainer_hooks.restore.fetch import Loader, Supply
from trainer_hooks.restore.local import LocalSlots
from trainer_hooks.restore.reshard import Want, plan_reads


class Listener:
    """A vault that notes what it is asked for, and is out of reach."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[tuple[str, tuple[tuple[int, int], ...]]] = []

    def open_segment(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(directory=str(self.directory))

    def fetch(self, *, node: str, ranges: tuple[tuple[int, int], ...], **_: Any) -> Future[Any]:
        self.asked.append((node, ranges))
        answer: Future[Any] = Future()
        answer.set_exception(Unavailable("out of reach"))
        return answer


def test_parameters_are_sent_for_before_moments_whoever_has_them(tmp_path: Path) -> None:
    names = ("a", "a.moment", "b", "b.moment")
    catalog = tuple(Tensor(name, "float32", 4, (16,), False) for name in names)
    supplies = []
    for node, held in (("n2", (1, 0)), ("n3", (3, 2))):
        stored = tuple(Stored(index, whole((16,)), 64 * place) for place, index in enumerate(held))
        where = {"path": "", "slot": 0, "replica": False, "manifest_digest": ""}
        slot = SlotInfo(node=node, rank=int(node[1]), version=Version(1, 1), **where)
        supplies.append(Supply(slot, Manifest(LAYOUT_FORMAT, 0, 2, catalog, stored, 128, 56, 192, 0)))
    targets = [Destination(torch.zeros(16), whole((16,)), parameter="." not in name) for name in names]
    reads = plan_reads([Want(i, whole((16,))) for i in range(4)], [supply.manifest for supply in supplies])
    vault: Any = Listener(tmp_path)
    loader = Loader(vault, "job", Member(rank=0, node="n1", local_rank=0), targets, LocalSlots())
    _, failures = loader.load(reads, supplies, blob_of=1)
    parameters = {("n2", ((64, 64),)), ("n3", ((64, 128),))}  # and the Python state
    assert [set(vault.asked[:2]), set(vault.asked[2:])] == [parameters, {("n2", ((0, 64),)), ("n3", ((0, 64),))}]
    assert [failure.slot.node for failure in failures] in (["n2", "n3"], ["n3", "n2"])
