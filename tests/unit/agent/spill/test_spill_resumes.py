"""Writers of checkpoints that are killed, find damage, or are not alone."""

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
from everstep_agent.spill.__main__ import execute
from everstep_agent.spill.order import SpillOrder
from everstep_agent.spill.target import DirectoryTarget, ObjectStoreTarget, open_target
from everstep_trainer.state.tracked_state import TrackedState
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from torch import nn

from everstep.errors import ConfigurationError, DigestMismatch, MalformedMessage, NotFound, NotRestorable
from everstep.ids import Version
from everstep.layout.slots import SegmentView
from everstep.layout.stored_checkpoints import METADATA_FILE, folder_name
from everstep.wire.v1.local import RequestFailed, Spilled
from tests.support.killed_spill import contents
from tests.support.spilling import fill_slots
from tests.support.vaults import map_segment

pytestmark = pytest.mark.slow  # starts processes

VERSION = Version(2, 7)
ROOT = Path(__file__).parents[4]


def small_job(tmp_path: Path, **how: Any) -> SpillOrder:
    torch.manual_seed(5)
    model = nn.Linear(3, 4)
    state = TrackedState({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    return fill_slots(tmp_path / "slots", state, VERSION, **{"world": 2, "layout": "sharded", **how})


def written_to(order: SpillOrder, folder: Path) -> Spilled:
    return execute(msgspec.structs.replace(order, url=str(folder)))


def slot_of(order: SpillOrder, rank: int) -> SegmentView:
    return map_segment(Path(order.sources[rank].path))


def test_writer_killed_at_any_write_leaves_no_trace(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    written_to(order, tmp_path / "whole")
    (tmp_path / "order").write_bytes(msgspec.msgpack.encode(order))
    command = [sys.executable, "-m", "tests.support.killed_spill", str(tmp_path / "order"), str(tmp_path / "out")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    deaths, *seen = said.stdout.split()
    assert int(deaths) > 25
    assert seen == [contents(tmp_path / "whole")]


def test_existing_files_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = small_job(tmp_path)
    written_to(order, tmp_path / "out")

    def refuse(*_: object) -> None:
        raise AssertionError("written again")

    monkeypatch.setattr(DirectoryTarget, "open_for_writing", refuse)
    assert written_to(order, tmp_path / "out").complete


@pytest.mark.parametrize("harm", ["flipped", "shorter", "longer", "other"])
def test_leftover_file_is_compared_byte_by_byte(tmp_path: Path, harm: str) -> None:
    order = small_job(tmp_path)
    written_to(order, tmp_path / "whole")
    written_to(order, tmp_path / "out")
    folder = tmp_path / "out" / folder_name(VERSION)
    (folder / ".metadata").unlink()
    (folder / ".everstep" / "1").unlink()
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= harm == "flipped"
    harmed = {"flipped": data, "shorter": data[: len(data) // 3], "longer": data + b"more", "other": b"x" * 9}
    (folder / "__1_0.distcp").write_bytes(harmed[harm])
    written_to(order, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bit_flip_in_a_slot_prevents_the_checkpoint(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    slot_of(order, 1).payload(0)[5] ^= 4
    with pytest.raises(DigestMismatch, match="rank 1's 2:7"):
        written_to(order, tmp_path / "out")
    folder = tmp_path / "out" / folder_name(VERSION)
    assert not (folder / ".metadata").exists()
    assert not (folder / ".everstep" / "1").exists()


def test_refilled_slot_is_refused(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    slot_of(order, 0).begin(0, 0, Version(2, 8), b"", 8)
    with pytest.raises(NotFound, match="no longer exists"):
        written_to(order, tmp_path / "out")


def test_slot_with_a_different_manifest_is_refused(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    swapped = msgspec.structs.replace(order, manifests={0: order.manifests[1], 1: order.manifests[0]})
    with pytest.raises(MalformedMessage, match="another manifest"):
        written_to(swapped, tmp_path / "out")


def test_incomplete_version_is_not_begun(tmp_path: Path) -> None:
    order = small_job(tmp_path)
    lacking = msgspec.structs.replace(order, manifests={0: order.manifests[0]}, sources=order.sources[:1])
    with pytest.raises(NotRestorable, match=r"model\.weight"):
        written_to(lacking, tmp_path / "out")
    assert not (tmp_path / "out").exists()


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
        pytest.fail("with two copies of each byte, two of three ranks hold everything")
    assert outcome.complete
    written_to(other, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("url", ["memory://spilled", "local://{}/object-store"])
def test_an_object_store_holds_the_same(tmp_path: Path, url: str) -> None:
    order = small_job(tmp_path)
    url = url.format(tmp_path)
    assert execute(msgspec.structs.replace(order, url=url)).complete
    assert execute(msgspec.structs.replace(order, url=url)).complete, "a second writer finds it done"
    written_to(order, tmp_path / "whole")
    place = open_target(url)
    assert folder_name(VERSION) in place.folders()
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert place.get(str(path.relative_to(tmp_path / "whole"))) == path.read_bytes()
    place.remove(folder_name(VERSION))
    assert folder_name(VERSION) not in place.folders()
    assert place.get(f"{folder_name(VERSION)}/.metadata") is None


class InParts(AbstractBufferedFile):
    """A file of an object store: there when it was closed, and all at once."""

    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            self.fs.objects[self.path] = self.parts
        return True


class Store(AbstractFileSystem):
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


def test_newest_two_checkpoints_stay_when_keep_is_one(tmp_path: Path) -> None:
    """Whoever counts checkpoints may never hear that the newest is whole: with one to keep there are two."""
    state = TrackedState({"model": nn.Linear(2, 2)})
    for step in (3, 4, 5):
        order = fill_slots(tmp_path / f"slots-{step}", state, Version(1, step))
        outcome = execute(msgspec.structs.replace(order, url=f"{tmp_path}/out", keep=1))
    assert open_target(f"{tmp_path}/out").folders() == [folder_name(Version(1, step)) for step in (4, 5)]
    assert outcome.removed == (folder_name(Version(1, 3)),)


def spill(order: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "everstep_agent.spill"]
    return subprocess.run(command, input=order, cwd=ROOT, capture_output=True, timeout=120)


def test_command_prints_the_outcome_of_an_order(tmp_path: Path) -> None:
    order = msgspec.structs.replace(small_job(tmp_path), url=str(tmp_path / "out"))
    said = spill(msgspec.msgpack.encode(order))
    assert said.returncode == 0, said.stderr
    outcome = msgspec.json.decode(said.stdout, type=Spilled)
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
    said = spill(msgspec.msgpack.encode(msgspec.structs.replace(order, **change)))
    assert said.returncode == 1
    assert sentence in msgspec.json.decode(said.stdout, type=RequestFailed).message
    assert said.stderr == b""


def test_missing_store_package_is_refused_with_install_hint() -> None:
    with pytest.raises(ConfigurationError, match="its package for oss://, or obstore, on every node"):
        open_target("oss://bucket/x")


def test_malformed_order_is_refused() -> None:
    said = spill(b"\xc1")
    assert said.returncode == 1
    assert msgspec.json.decode(said.stdout, type=RequestFailed).code == "malformed"
