"""Flipped bits in files on storage are detected before anything is restored from them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, state_dict_saver

from everstep.ids import Version
from everstep.layout.digests import DIGESTS_FILE
from everstep.layout.stored_checkpoints import folder_name
from everstep_agent.spill.__main__ import execute
from everstep_trainer.importers.storage_reads import DamagedCheckpoint
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.vaults.sealed_slots import fill_slots, load_checkpoint_alone

pytestmark = pytest.mark.slow

VERSION = Version(3, 12)


class Small:
    """A layer, an optimizer with momentum, and a schedule."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(5, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.state = TrackedState(self.tracked)

    def train(self) -> Small:
        self.model(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        return self

    def saved(self) -> dict[str, Any]:
        return {key: tracked.state_dict() for key, tracked in self.tracked.items()}

    def start_from(self, url: object) -> int:
        return load_checkpoint_alone(url, self.tracked, self.state)

    def contents(self) -> str:
        torch.set_printoptions(precision=9)
        return repr(self.saved())


@pytest.fixture(scope="module")
def before() -> Small:
    return Small().train()


def _spilled(before: Small, tmp_path: Path, **options: Any) -> Path:
    order = fill_slots(tmp_path / "slots", before.state, VERSION, **options)
    assert execute(msgspec.structs.replace(order, url=str(tmp_path / "out"))).complete
    return tmp_path / "out" / folder_name(VERSION)


def _with_flipped_bit(path: Path, bit: int, try_it: Callable[[], None]) -> None:
    right = path.read_bytes()
    wrong = bytearray(right)
    wrong[bit >> 3] ^= 1 << (bit & 7)
    path.write_bytes(wrong)
    try:
        try_it()
    finally:
        path.write_bytes(right)


def _count_detected(before: Small, url: object, path: Path, bits: list[int]) -> int:
    """Return how many of the flips are detected. Check that the others do not change what is restored."""
    found = 0

    def try_it() -> None:
        nonlocal found
        after, message = Small(), path.name
        try:
            after.start_from(url)
        except DamagedCheckpoint as error:
            found, message = found + 1, str(error)
        else:
            assert after.contents() == before.contents()
        assert path.name in message

    for bit in bits:
        _with_flipped_bit(path, bit, try_it)
    return found


def _drawn(path: Path, count: int) -> list[int]:
    return random.Random(path.name).sample(range(8 * path.stat().st_size), count)


READ = re.compile(r"model\..*|.*momentum_buffer|everstep\.(version|blob\.0)")
"""What rank 0 restores from; the rest is there for programs without Everstep, and for other ranks."""


def _read_archives(folder: Path, file: str) -> list[tuple[int, int]]:
    """Return offset and length of the archives from which rank 0 restores."""
    stored = filesystem.FileSystemReader(folder).read_metadata().storage_data
    return [
        (i.offset, i.length) for index, i in stored.items() if READ.fullmatch(index.fqn) and i.relative_path == file
    ]


@pytest.mark.promise("storage-checked")
def test_flipped_bit_in_restored_bytes_is_found(tmp_path: Path, before: Small) -> None:
    folder = _spilled(before, tmp_path, world=2, layout="sharded")
    draw = random.Random(5)
    for file in ("__0_0.distcp", "__1_0.distcp"):
        bits = [8 * at + draw.randrange(8 * length) for at, length in _read_archives(folder, file) for _ in range(6)]
        assert len(bits) >= 18
        assert _count_detected(before, folder, folder / file, bits) == len(bits)
    for file in (".metadata", DIGESTS_FILE):
        bits = _drawn(folder / file, 25)
        assert _count_detected(before, folder, folder / file, bits) == len(bits)


@pytest.mark.promise("storage-checked")
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_flipped_bit_never_changes_the_restored_state(tmp_path: Path, before: Small, file: str) -> None:
    folder = _spilled(before, tmp_path, world=2, layout="sharded")
    assert _count_detected(before, folder, folder / file, _drawn(folder / file, 60)) > 0


@pytest.mark.promise("storage-checked")
def test_valid_bytes_of_another_checkpoint_are_rejected(tmp_path: Path, before: Small) -> None:
    folder, other = _spilled(before, tmp_path / "a"), _spilled(Small().train().train(), tmp_path / "b")
    (folder / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp is damaged: \d+ bytes at \d+ have the wrong digest"):
        Small().start_from(folder)


def test_folder_without_digests_is_checked_by_its_archives(tmp_path: Path, before: Small) -> None:
    folder = _spilled(before, tmp_path)
    (folder / DIGESTS_FILE).unlink()
    after = Small()
    assert after.start_from(folder) == VERSION.step
    assert after.contents() == before.contents()
    file = folder / "__0_0.distcp"
    weight = before.model.weight.detach().numpy().tobytes()
    at = 8 * file.read_bytes().index(weight)
    bits = list(range(at, at + 8 * len(weight), 29))
    assert _count_detected(before, folder, file, bits) == len(bits)
    _count_detected(before, folder, file, _drawn(file, 40))


@pytest.mark.promise("storage-checked")
@pytest.mark.filterwarnings("ignore")
def test_flipped_bit_in_a_dcp_file_is_found_or_harmless(tmp_path: Path, before: Small) -> None:
    state_dict_saver.save(before.saved(), checkpoint_id=tmp_path / "theirs", no_dist=True)
    file = tmp_path / "theirs" / "__0_0.distcp"
    assert _count_detected(before, tmp_path / "theirs", file, _drawn(file, 60)) > 20


def test_a_bit_in_a_torch_save_file_is_found_or_harmless(tmp_path: Path, before: Small) -> None:
    file = tmp_path / "file.pt"
    torch.save(before.saved(), file)
    assert _count_detected(before, file, file, _drawn(file, 100)) > 30


@pytest.mark.promise("storage-checked")
def test_every_bit_of_a_tensor_in_a_mapped_file_is_looked_at(tmp_path: Path, before: Small) -> None:
    torch.save({"model": before.model.state_dict()}, tmp_path / "file.pt")
    weight = before.model.weight.detach().numpy().tobytes()
    at = 8 * (tmp_path / "file.pt").read_bytes().index(weight)
    bits = list(range(at, at + 8 * len(weight), 19))
    assert _count_detected(before, tmp_path / "file.pt", tmp_path / "file.pt", bits) == len(bits)


def test_legacy_torch_save_file_is_refused_with_advice(tmp_path: Path, before: Small) -> None:
    torch.save({"model": before.model.state_dict()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedCheckpoint, match=r"old\.pt is damaged, or not a zip archive of torch\.save \(since"):
        Small().start_from(tmp_path / "old.pt")
