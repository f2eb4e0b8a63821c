"""Writers of checkpoints that are killed, find damage, or share the work with other writers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from torch import nn

from everstep.errors import ConfigurationError, DigestMismatch, NotRestorable
from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.layout.stored_checkpoints import METADATA_FILE, folder_name
from everstep.wire.v1.local import RequestFailed, Spilled
from everstep_agent.spill.__main__ import execute
from everstep_agent.spill.order import SpillOrder
from everstep_agent.spill.target import ObjectStoreTarget, open_target
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.vaults.sealed_slots import fill_slots
from tests.support.vaults.vault_process import map_segment
from tests.unit.agent.spill.killed_spill import contents

pytestmark = pytest.mark.slow  # starts processes

VERSION = Version(2, 7)
ROOT = Path(__file__).parents[4]


def small_job(tmp_path: Path, **choices: Any) -> SpillOrder:
    torch.manual_seed(5)
    model = nn.Linear(3, 4)
    state = TrackedState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    return fill_slots(tmp_path / "slots", state, VERSION, **{"world": 2, "layout": "sharded", **choices})


def written_to(order: SpillOrder, folder: Path) -> Spilled:
    return execute(msgspec.structs.replace(order, url=str(folder)))


def slot_of(order: SpillOrder, rank: int) -> SegmentView:
    return map_segment(Path(order.sources[rank].path))


def test_writer_killed_at_any_write_leaves_no_trace(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    written_to(order, tmp_path / "whole")
    (tmp_path / "order").write_bytes(msgspec.msgpack.encode(order))
    command = [
        sys.executable,
        "-m",
        "tests.unit.agent.spill.killed_spill",
        str(tmp_path / "order"),
        str(tmp_path / "out"),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    deaths, *seen = result.stdout.split()
    assert int(deaths) > 25
    assert seen == [contents(tmp_path / "whole")]


def test_bit_flip_in_a_slot_prevents_the_checkpoint(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    slot_of(order, 1).payload(0)[5] ^= 4
    with pytest.raises(DigestMismatch, match="rank 1's 2:7"):
        written_to(order, tmp_path / "out")
    folder = tmp_path / "out" / folder_name(VERSION)
    assert not (folder / ".metadata").exists()
    assert not (folder / ".everstep" / "1").exists()


def test_last_node_to_write_completes_the_checkpoint(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    nodes = [msgspec.structs.replace(order, sources=(source,)) for source in order.sources]
    assert not written_to(nodes[1], tmp_path / "out").complete
    assert written_to(nodes[0], tmp_path / "out").complete
    written_to(order, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_files_of_another_partition_do_not_complete_a_version(tmp_path: Path) -> None:
    order = small_job(tmp_path, layout="replicated", world=3, nodes=3)
    fewer = {rank: body for rank, body in order.manifests.items() if rank != 2}
    other = msgspec.structs.replace(order, manifests=fewer, sources=order.sources[:2])
    written_to(msgspec.structs.replace(order, sources=order.sources[:2]), tmp_path / "out")
    try:
        outcome = written_to(other, tmp_path / "out")
    except NotRestorable:
        pytest.fail("two of three ranks hold every byte, as each byte has two copies")
    assert outcome.complete
    written_to(other, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("url", ["memory://spilled", "local://{}/object-store"])
def test_object_store_holds_the_same(tmp_path: Path, url: str) -> None:
    order = small_job(tmp_path)
    url = url.format(tmp_path)
    assert execute(msgspec.structs.replace(order, url=url)).complete
    assert execute(msgspec.structs.replace(order, url=url)).complete, (
        "a second writer must find the checkpoint complete"
    )
    written_to(order, tmp_path / "whole")
    place = open_target(url)
    assert folder_name(VERSION) in place.folders()
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert place.get(str(path.relative_to(tmp_path / "whole"))) == path.read_bytes()
    place.remove(folder_name(VERSION))
    assert folder_name(VERSION) not in place.folders()
    assert place.get(f"{folder_name(VERSION)}/.metadata") is None


class InParts(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file of an object store: it appears when it is closed, with its whole content."""

    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            self.fs.objects[self.path] = self.parts
        return True


class Store(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> InParts:
        return InParts(self, path, mode, block_size=4)


def test_abandoned_object_never_appears() -> None:
    store = Store()
    place = ObjectStoreTarget(store, "bucket")
    given_up, whole = place.open_for_writing("given up"), place.open_for_writing("whole")
    for file in (given_up, whole):
        file.append(b"several parts")
    given_up.close_unfinished()
    whole.finish()
    del given_up
    gc.collect()
    assert store.objects == {"bucket/whole": b"several parts"}


@pytest.mark.parametrize("url", ["{}/out", "local://{}/store"])
def test_older_checkpoints_are_removed_once_a_newer_is_whole(tmp_path: Path, url: str) -> None:
    url = url.format(tmp_path)
    state = TrackedState({"model": nn.Linear(2, 2)})
    for step in (3, 4, 5, 6):
        order = fill_slots(tmp_path / f"slots-{step}", state, Version(1, step))
        outcome = execute(msgspec.structs.replace(order, url=url, keep=0 if step == 5 else 2))
        if step == 5:
            open_target(url).remove(f"{folder_name(Version(1, 5))}/{METADATA_FILE}")
    place = open_target(url)
    assert place.folders() == [folder_name(Version(1, step)) for step in (4, 6)]
    assert outcome.removed == (folder_name(Version(1, 3)), folder_name(Version(1, 5)))
    assert outcome.remaining == (folder_name(Version(1, 4)), folder_name(Version(1, 6)))


def spill(order: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "everstep_agent.spill"]
    return subprocess.run(command, input=order, cwd=ROOT, capture_output=True, timeout=120)


def test_command_prints_the_outcome_of_an_order(tmp_path: Path) -> None:
    order = msgspec.structs.replace(small_job(tmp_path), url=str(tmp_path / "out"))
    result = spill(msgspec.msgpack.encode(order))
    assert result.returncode == 0, result.stderr
    outcome = msgspec.json.decode(result.stdout, type=Spilled)
    assert (outcome.complete, outcome.folder) == (True, folder_name(VERSION))
    files = sum(os.path.getsize(p) for p in (tmp_path / "out").rglob("*.distcp"))
    assert outcome.bytes == files


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"url": "relative/path"}, "use an absolute path, or a URL"),
        ({"url": "nosuch://bucket/x"}, "install fsspec"),
        ({"version": Version(2, 8)}, "no longer exists"),
        ({"url": "/proc/nothing"}, "the storage failed"),
    ],
    ids=["relative", "unknown", "gone", "storage"],
)
def test_command_prints_the_refusal_and_exits_with_1(tmp_path: Path, change: Any, sentence: str) -> None:
    order = msgspec.structs.replace(small_job(tmp_path), url=str(tmp_path / "out"))
    result = spill(msgspec.msgpack.encode(msgspec.structs.replace(order, **change)))
    assert result.returncode == 1
    assert sentence in msgspec.json.decode(result.stdout, type=RequestFailed).message
    assert result.stderr == b""


def test_missing_store_package_is_refused_with_install_hint() -> None:
    with pytest.raises(ConfigurationError, match="its package for oss://, or obstore, on every node"):
        open_target("oss://bucket/x")
