"""A job that starts from a checkpoint on storage: Everstep's, torch.distributed.checkpoint's or torch.save's."""

from __future__ import annotations

import enum
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

from everstep.errors import ConfigurationError, NotRestorable
from everstep.ids import Version
from everstep.layout.digests import DIGESTS_FILE
from everstep.layout.manifests import Box
from everstep.layout.stored_checkpoints import folder_name
from everstep_agent.spill.__main__ import execute
from everstep_trainer.importers import storage_reads
from everstep_trainer.importers.checkpoint_files import open_checkpoint
from everstep_trainer.importers.importer import read_checkpoint
from everstep_trainer.importers.storage_reads import DamagedCheckpoint
from everstep_trainer.importers.storage_reads import _fetch as fetch
from everstep_trainer.state.python_value_codec import as_bytes
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.vaults.sealed_slots import UnusualModel, fill_slots, load_checkpoint_alone, train

VERSION = Version(4, 9)
ANY_TORCH = pytest.mark.filterwarnings("ignore")


class Job:
    """A model, an optimizer with two parameter groups, and a schedule."""

    def __init__(self, *, trained: bool, sharded: bool = False) -> None:
        self.model = UnusualModel(odd_dtypes=not sharded)
        if not trained:
            with torch.no_grad():
                for tensor in (*self.model.parameters(), *self.model.buffers()):
                    tensor.zero_()
        if sharded:
            fully_shard(self.model)
        others = [p for n, p in self.model.named_parameters() if n != "low"]
        groups: list[dict[str, Any]] = [{"params": others, "lr": 0.1 if trained else 9.0}, {"params": [self.model.low]}]
        self.optimizer = torch.optim.AdamW(groups)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.tracked = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.state = TrackedState(self.tracked)
        if trained:
            train(self.model, self.optimizer)
            self.schedule.step()
            self.model.seen = 8

    def start_from(self, url: object, rank: int = 0, world: int = 1) -> int:
        return load_checkpoint_alone(url, self.tracked, self.state, rank, world)

    def contents(self) -> dict[str, Any]:
        """Return the contents of all tracked state, by name."""
        whole: dict[str, Any] = {t.name: as_bytes(t.local) for t in self.state.tensors()}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return whole | {"groups": groups, "schedule": self.schedule.state_dict(), "seen": self.model.seen}


@pytest.fixture(scope="module")
def before() -> Job:
    return Job(trained=True)


def spilled(job: Job, folder: Path, version: Version = VERSION, **choices: Any) -> Path:
    order = fill_slots(folder / f"slots-{version.step}", job.state, version, **choices)
    assert execute(msgspec.structs.replace(order, url=str(folder / "out"))).complete
    return folder / "out"


def test_newest_whole_checkpoint_is_chosen(tmp_path: Path, before: Job) -> None:
    out = spilled(before, tmp_path, Version(7, 9))
    spilled(before, tmp_path, Version(1, 12))  # from a restarted job, which counts its generations from 1
    os.utime(out / folder_name(Version(7, 9)) / ".metadata", (1, 1))
    spilled(before, tmp_path, Version(4, 15))
    (out / folder_name(Version(4, 15)) / ".metadata").unlink()
    assert Job(trained=False).start_from(out) == 12


@pytest.mark.promise("import-checkpoints")
@ANY_TORCH
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_fsdp2_job_starts_from_a_dcp_checkpoint(tmp_path: Path, alone: None, flat: bool) -> None:
    before, after = Job(trained=True, sharded=True), Job(trained=False, sharded=True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)  # as torchtitan saves
    model, optimizer = get_state_dict(before.model, before.optimizer, options=options)
    state = {"model": model, "optimizer": optimizer, "schedule": before.schedule.state_dict()}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "theirs")
    assert after.start_from(tmp_path / "theirs") == 0
    assert after.contents() == before.contents()


@pytest.mark.promise("import-checkpoints")
@ANY_TORCH
@pytest.mark.parametrize("harm", ["differ", "missing"])
def test_flattened_options_must_match_a_group(tmp_path: Path, before: Job, harm: str) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(before.model, before.optimizer, options=flat)
    if harm == "differ":
        cast(dict[str, object], optimizer)["param_groups.norm.weight.lr"] = 0.5
        sentence = r"optimizer has first\.weight and norm\.weight in one parameter group now, .* differ in lr"
    else:
        for name in [name for name in optimizer if name.startswith("param_groups.norm.weight.")]:
            del optimizer[name]
        sentence = r"has no options of norm\.weight, which optimizer trains now"
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "flat.pt")
    with pytest.raises(NotRestorable, match=sentence):
        Job(trained=False).start_from(tmp_path / "flat.pt")


@pytest.mark.promise("import-checkpoints")
@pytest.mark.parametrize("form", ["named", "usual", "wrapped", "compiled"])
@pytest.mark.parametrize("url", ["{}/file.pt", "memory://{}/file.pt"], ids=["path", "url"])
def test_a_torch_save_file_is_read(tmp_path: Path, before: Job, form: str, url: str) -> None:
    model = before.model.state_dict()
    wrapped = {f"module.{name}": value for name, value in model.items()}
    compiled = {f"_orig_mod.{name.replace('norm.', 'norm._orig_mod.')}": value for name, value in model.items()}
    optimizer, schedule = before.optimizer.state_dict(), before.schedule.state_dict()
    state = {
        "named": {"model": model, "optimizer": optimizer, "schedule": schedule},
        "usual": {"model_state_dict": model, "optimizer_state_dict": optimizer, "schedule_state_dict": schedule},
        "compiled": {"model": compiled, "optimizer": optimizer, "schedule": schedule},
        "wrapped": {"state_dict": wrapped, "optimizer": optimizer, "schedule": schedule, "epoch": 3},
    }[form]
    url = url.format(tmp_path)
    with fsspec.open(url, "wb") as file:
        torch.save(state, file)
    after = Job(trained=False)
    assert after.start_from(url) == 0
    assert after.contents() == before.contents()


@pytest.fixture
def folder_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that fetched files go to."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_object_store_file_is_fetched_once_per_node_and_removed(
    tmp_path: Path, before: Job, folder_for_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path}/weights.pt"
    with fsspec.open(url, "wb") as file:
        torch.save({"model": before.model.state_dict()}, file)
    fetches: list[int] = []

    def counted(*args: Any) -> None:
        fetches.append(1)
        fetch(*args)

    monkeypatch.setattr(storage_reads, "_fetch", counted)
    jobs = [Job(trained=False) for _ in range(2)]
    starts = [read_checkpoint(url, job.tracked, job.state, rank, 2) for rank, job in enumerate(jobs)]
    assert len(fetches) == 1
    assert len(list(folder_for_files.iterdir())) == 1
    for start in starts:
        start.finish()
    assert not list(folder_for_files.iterdir())
    assert all(torch.equal(job.model.first.weight, before.model.first.weight) for job in jobs)


def test_file_without_local_room_is_refused_with_advice(
    tmp_path: Path, before: Job, folder_for_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path}/weights.pt"
    with fsspec.open(url, "wb") as file:
        torch.save({"model": before.model.state_dict()}, file)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(NotRestorable, match=r"room for 100: .*Convert it to a folder"):
        Job(trained=False).start_from(url)
    assert not list(folder_for_files.iterdir())


def test_weights_alone_start_with_fresh_optimizer_state(
    tmp_path: Path, before: Job, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(before.model.state_dict(), tmp_path / "weights.pt")
    after = Job(trained=False)
    after.start_from(tmp_path / "weights.pt")
    assert torch.equal(after.model.first.weight, before.model.first.weight)
    assert not after.optimizer.state
    assert "has no state of optimizer" in caplog.text
    assert "has no state of schedule" in caplog.text


def test_checkpoint_stores_the_buffers_of_each_rank(tmp_path: Path, before: Job) -> None:
    out = spilled(before, tmp_path, world=3, layout="sharded")
    checkpoint = open_checkpoint(str(out / folder_name(VERSION)))
    key = "everstep.own.1.model.norm.running_mean"
    ((_, value),) = checkpoint.read(key, Box((0,), (7,)))
    assert torch.equal(value, before.model.get_buffer("norm.running_mean"))


def without_digests(folder: Path) -> Path:
    """Remove the digests, which checkpoints of other programs and of earlier releases lack."""
    (folder / DIGESTS_FILE).unlink()
    return folder


def test_missing_checkpoint_lists_the_accepted_forms(tmp_path: Path) -> None:
    with pytest.raises(NotRestorable, match=r"not a checkpoint to start from: a torch\.save file"):
        Job(trained=False).start_from(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot open 'nosuch://x'"):
        Job(trained=False).start_from("nosuch://x")


def test_missing_tensors_are_named(tmp_path: Path, before: Job) -> None:
    state = before.model.state_dict()
    del state["norm.weight"]
    torch.save({"model": state}, tmp_path / "less.pt")
    with pytest.raises(NotRestorable, match=r"lacks 1 of \d+ tensors of tracked modules \(model\.norm\.weight\)"):
        Job(trained=False).start_from(tmp_path / "less.pt")


def test_another_number_of_groups_is_refused(tmp_path: Path, before: Job) -> None:
    optimizer = torch.optim.SGD(before.model.parameters(), lr=1)
    torch.save({"model": before.model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "sgd.pt")
    with pytest.raises(NotRestorable, match="optimizer has 2 parameter groups now, and 1 in"):
        Job(trained=False).start_from(tmp_path / "sgd.pt")


class Trap:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a stored pickle was run",))


def test_start_runs_no_code_stored_in_a_file(tmp_path: Path, before: Job) -> None:
    torch.save({"model": before.model.state_dict(), "schedule": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(NotRestorable, match="without running code that is stored in it"):
        Job(trained=False).start_from(tmp_path / "trap.pt")


@pytest.mark.parametrize("place", ["metadata", "object"])
def test_start_runs_no_code_stored_in_a_folder(tmp_path: Path, before: Job, place: str) -> None:
    folder = without_digests(spilled(before, tmp_path) / folder_name(VERSION))
    if place == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Trap()))
        sentence = "has no place in a checkpoint's metadata"
    else:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        del metadata.state_dict_metadata["everstep.version"]  # without it, the folder may be of any program
        info = next(v for k, v in metadata.storage_data.items() if k.fqn == "schedule.gamma")
        body = io.BytesIO()
        torch.save(Trap(), body)
        info.relative_path, info.offset, info.length = "trap", 0, len(body.getvalue())
        (folder / "trap").write_bytes(body.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        sentence = "without running code that is stored in it"
    with pytest.raises(NotRestorable, match=sentence):
        Job(trained=False).start_from(folder)


class _AsEarly311(pickle.Pickler):
    """Pickles members of enumerations by ``getattr``, as Python 3.11.2 does."""

    def reducer_override(self, thing: Any) -> Any:
        return (getattr, (type(thing), thing.name)) if isinstance(thing, enum.Enum) else NotImplemented


def test_folder_of_any_python_release_is_read(tmp_path: Path, before: Job) -> None:
    folder = without_digests(spilled(before, tmp_path) / folder_name(VERSION))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    written = io.BytesIO()
    _AsEarly311(written, 4).dump(metadata)
    assert b"getattr" in written.getvalue()
    (folder / ".metadata").write_bytes(written.getvalue())
    after = Job(trained=False)
    assert after.start_from(folder) == VERSION.step
    assert torch.equal(after.model.low, before.model.low)


class _Reached:
    """An attribute of an arbitrary object."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (torch.Size, "__subclasses__"))


def test_metadata_allows_attributes_of_enum_members_only(tmp_path: Path, before: Job) -> None:
    folder = without_digests(spilled(before, tmp_path) / folder_name(VERSION))
    (folder / ".metadata").write_bytes(pickle.dumps(_Reached()))
    with pytest.raises(NotRestorable, match=r"getattr of .* has no place in a checkpoint's metadata"):
        Job(trained=False).start_from(folder)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("harm", ["short", "gone", "metadata", "part"])
def test_a_damaged_folder_is_refused(tmp_path: Path, before: Job, harm: str, sealed: bool) -> None:
    folder = spilled(before, tmp_path, world=2, layout="sharded") / folder_name(VERSION)
    if not sealed:
        without_digests(folder)
    file, metadata = folder / "__1_0.distcp", folder / ".metadata"
    if harm == "short":
        file.write_bytes(file.read_bytes()[:-2000])
    elif harm == "gone":
        file.unlink()
    elif harm == "metadata":
        metadata.write_bytes(metadata.read_bytes()[:-40])
    else:
        read = pickle.loads(metadata.read_bytes())
        read.state_dict_metadata["model.first.weight"].chunks.pop()
        metadata.write_bytes(pickle.dumps(read))
    sentence = {
        "short": "too short",
        "gone": "is missing",
        "metadata": "cannot be read",
        "part": "parts of model.first",
    }
    if sealed:
        sentence |= dict.fromkeys(("metadata", "part"), r"\.metadata is damaged: it has the wrong digest")
    with pytest.raises(DamagedCheckpoint, match=sentence[harm]):
        Job(trained=False).start_from(folder)


def test_stages_under_one_key_are_read_as_one_model(tmp_path: Path) -> None:
    def stages() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        made = [nn.Sequential(OrderedDict({name: nn.Linear(3, 3)})) for name in ("first", "second")]
        return list(made), [torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9) for stage in made]

    (before, optimizers), (after, others) = stages(), stages()
    for stage, optimizer in zip(before, optimizers, strict=True):
        stage(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    state = TrackedState({"model": before, "optimizer": optimizers})
    order = fill_slots(tmp_path / "slots", state, VERSION, world=2)
    execute(msgspec.structs.replace(order, url=str(tmp_path / "out")))
    tracked: dict[str, object] = {"model": after, "optimizer": others}
    assert load_checkpoint_alone(tmp_path / "out", tracked, TrackedState(tracked)) == VERSION.step
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert [len(o.state) for o in others] == [2, 2]
    merged = {name: value for stage in before for name, value in stage.state_dict().items()}
    torch.save({"model": merged}, tmp_path / "plain.pt")
    plain, fresh = stages()
    tracked = {"model": plain, "optimizer": fresh}
    assert load_checkpoint_alone(tmp_path / "plain.pt", tracked, TrackedState(tracked)) == 0
    assert torch.equal(plain[1].get_parameter("second.weight"), before[1].get_parameter("second.weight"))


def test_non_tensor_optimizer_state_is_restored(tmp_path: Path) -> None:
    model, after = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, after))
    for count, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"count": count}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    tracked: dict[str, object] = {"model": after, "optimizer": other}
    load_checkpoint_alone(tmp_path / "file.pt", tracked, TrackedState(tracked))
    assert [other.state[p] for p in after.parameters()] == [{"count": 0}, {"count": 1}]


class Outer(nn.Module):
    """A model with a submodule that has the same tensor names, below the key under which models are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.model = nn.Module()
        self.model.norm = nn.LayerNorm(2)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.model.norm.weight)


class Headed(nn.Module):
    """A model with a head, in the naming of transformers."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2)


def load_into(model: nn.Module, path: Path) -> nn.Module:
    tracked: dict[str, Any] = {"model": model}
    load_checkpoint_alone(path, tracked, TrackedState(tracked))
    return model


def equal(first: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.promise("import-checkpoints")
@pytest.mark.parametrize("form", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s}])
def test_submodule_named_like_a_wrapper_is_not_the_whole_model(tmp_path: Path, form: Any) -> None:
    before = Outer()
    torch.save(form(before.state_dict()), tmp_path / "file.pt")
    assert equal(load_into(Outer(), tmp_path / "file.pt"), before)


def test_headed_and_base_models_start_from_each_other(tmp_path: Path) -> None:
    before, base = Headed(), Headed()
    torch.save(before.state_dict(), tmp_path / "headed.pt")
    torch.save(before.base.state_dict(), tmp_path / "base.pt")
    assert equal(load_into(base, tmp_path / "base.pt"), before)
    base.base.base_model_prefix = "base"  # type: ignore[assignment]
    nn.init.zeros_(base.base.weight)
    assert equal(load_into(base.base, tmp_path / "headed.pt"), before.base)


def test_state_split_over_two_keys_is_refused(tmp_path: Path) -> None:
    state = Outer().state_dict()
    halves = {"model": {"norm.weight": state["norm.weight"], "norm.bias": state["norm.bias"]}, **state}
    torch.save({k: v for k, v in halves.items() if not k.startswith("norm")}, tmp_path / "file.pt")
    with pytest.raises(NotRestorable, match=r"lacks 2 of 4 tensors of tracked modules \(model\.norm\.weight"):
        load_into(Outer(), tmp_path / "file.pt")
