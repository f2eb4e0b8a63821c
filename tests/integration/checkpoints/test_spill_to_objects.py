"""Versions that vaults write to an object store, through fsspec to a server that speaks S3."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.layout.object_storage import filesystem_of
from everstep.layout.slots import slot_bytes_for
from everstep.layout.stored_checkpoints import folder_name
from everstep.wire.v1 import local
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.processes.fork_pool import ForkPool
from tests.support.services.object_store import ObjectServer, object_server
from tests.support.vaults.sealed_slots import fill_slots, load_checkpoint_alone
from tests.support.vaults.vault_process import DEADLINE_S, JOB, RankMemory, Vaults, map_segment, vaults

pytestmark = pytest.mark.slow

URL = "s3://bucket/runs/job"
WIDTH = 1700
"""Each of two ranks writes 11.6 MB, which is sent in parts."""
VERSIONS = tuple(Version(1, step) for step in (10, 20, 30))

LOADED = """
import sys, torch, torch.distributed.checkpoint as dcp
from obstore.fsspec import register
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
register("s3")
state = {"model": {f"{n}.{what}": torch.zeros(shape) for n in (0, 1) for what, shape in
                   (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))}}
dcp.load(state, storage_reader=FsspecReader(sys.argv[1]))
print({value for tensor in state["model"].values() for value in tensor.unique().tolist()})
assert not any(name.split(".")[0] in ("everstep", "trainer_hooks", "agent") for name in sys.modules)
""".replace("WIDTH", str(WIDTH))


class Model(nn.Sequential):
    def __init__(self, value: float) -> None:
        super().__init__(*(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(2)))
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


class Job:
    """Ranks 0 and 1 on n1 with a sealed slot of each of three versions; in all weights stands its step."""

    def __init__(self, running: Vaults, folder: Path) -> None:
        self.vaults, self.vault = running, running.start("n1")
        running.configure()
        ranks: dict[int, RankMemory] = {}
        for slot, version in enumerate(VERSIONS):
            state = TrackedState({"model": Model(version.step)})
            order = fill_slots(folder / str(version.step), state, version, world=2, layout="sharded")
            for source in order.sources:
                view = map_segment(Path(source.path))
                manifest, payload = view.manifest(0), bytes(view.payload(0))
                if source.rank not in ranks:
                    room = slot_bytes_for(len(manifest), len(payload))
                    ranks[source.rank] = RankMemory(self.vault.client(), source.rank, source.rank, room)
                ranks[source.rank].fill(slot, version, payload, manifest)

    def post(self, version: Version) -> int:
        request = {
            "job": JOB,
            "generation": 1,
            "version": version,
            "url": URL,
            "writers": {"n1": (0, 1)},
            "keep_last": 2,
        }
        return self.vaults.supervisors["n1"].post(local.Spill, **request)

    def spill(self, version: Version) -> local.Spilled:
        answer = self.vaults.supervisors["n1"].wait(self.post(version))
        assert isinstance(answer, local.Spilled), answer
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """An object store whose address is in the environment, as users configure it."""
    with object_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "here")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        yield server
        filesystem_of(URL)[0].clear_instance_cache()


def key(version: Version, name: str) -> str:
    return f"runs/job/{folder_name(version)}/{name}"


def whole(server: ObjectServer) -> list[Version]:
    """The checkpoints that a reader sees."""
    return [version for version in VERSIONS if key(version, ".metadata") in server.objects]


def elsewhere(code: str, *arguments: str) -> str:
    """Return the output of a process that does not use Everstep."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, cwd="/", env=clean, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started_from(url: str) -> tuple[int, set[float]]:
    """The step and the weights that a rank begins with, which wants the whole model; the last ones it had."""
    model = Model(0.0)
    objects = {"model": model}
    step = load_checkpoint_alone(url, objects, TrackedState(objects))
    return step, {value for parameter in model.parameters() for value in parameter.unique().tolist()}


@pytest.mark.promise("storage-checkpoints")
@pytest.mark.nightly  # tests/unit/agent/spill/test_spill_resumes.py is the smaller one
def test_object_store_checkpoints_are_whole_or_absent(
    server: ObjectServer, program_forks: ForkPool, tmp_path: Path
) -> None:
    first, second, third = VERSIONS
    held, killed = threading.Event(), threading.Event()

    def delay_part(method: str, name: str) -> None:
        if name == key(second, "__1_0.distcp") and not killed.is_set():
            held.set()  # a part of it has arrived
            killed.wait(DEADLINE_S)

    with vaults(program_forks) as running:
        job = Job(running, tmp_path)
        with pytest.raises(NotRestorable):
            started_from(URL)
        assert job.spill(first).complete
        server.on_change = delay_part
        job.post(second)
        assert held.wait(DEADLINE_S)
        assert whole(server) == [first]
        assert key(second, "__1_0.distcp") not in server.objects, "an upload is no object"
        assert started_from(URL) == (10, {10.0})
        job.vault.kill()
        killed.set()
        job.vault.start()
        running.configure()
        assert whole(server) == [first]
        assert job.spill(second).complete
        assert server.completed.count(key(second, "__0_0.distcp")) == 1, "what was there is not written again"
        outcome = job.spill(third)
        assert (outcome.complete, outcome.removed) == (True, (folder_name(first),))
        assert whole(server) == [second, third]
        assert not [name for name in server.objects if name.startswith(key(first, ""))]
        assert started_from(URL) == (30, {30.0})
        assert elsewhere(LOADED, f"{URL}/{folder_name(second)}").strip() == "{20.0}"
