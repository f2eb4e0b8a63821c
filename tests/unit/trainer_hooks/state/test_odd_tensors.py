"""Unusual tensors are restored as they were, or refused before they are stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.errors import NotRestorable
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.restore.restorer import Restoration as Restorer
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.lone_rank import LoneRank, lone_rank

VALUES = torch.tensor([1 + 2j, 3 - 1j])


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


class Holder(nn.Module):
    held: torch.Tensor

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", buffer)
        self.weight = nn.Parameter(torch.ones(2))


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0)


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: VALUES.clone().conj(),
    "negative": lambda: VALUES.clone().conj().imag,
    "large conjugate": lambda: torch.complex(torch.arange(4096.0), torch.ones(4096)).conj(),
    "inferred": inferred,
    "not a number": lambda: torch.full((4,), float("nan")),
    "half of complex": lambda: torch.ones(2, dtype=torch.complex32),
    "packed": lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
}


def raw(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    octets: list[int] = plain.reshape(-1).view(torch.uint8).tolist()
    return octets


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as made:
        yield made


def store_objects(rank: LoneRank, objects: dict[str, Any]) -> None:
    spec = generation(1)
    snapshots = Snapshotter(rank.client, TrackedState(objects), spec, spec.roster[0], HashStore(), lambda _: None)
    for step in (1, 2):
        snapshots.wait()
        snapshots.begin(step)
    snapshots.close(finish=True)


@pytest.mark.promise("tracked-state-exact")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensor_is_restored_unchanged(rank: LoneRank, name: str) -> None:
    store_objects(rank, {"model": Holder(ODD[name]())})
    fresh = Holder(ODD[name]())
    kind = fresh.held.dtype
    with torch.inference_mode(), torch.no_grad():
        fresh.held.copy_(torch.zeros_like(fresh.held))
    assert raw(fresh.held) != raw(ODD[name]())
    spec = generation(2, restore=RestoreRule())
    restored = Restoration(rank.client, spec, spec.roster[0], HashStore()).fill(TrackedState({"model": fresh}))
    assert restored.step == 2
    assert (raw(fresh.held), fresh.held.dtype) == (raw(ODD[name]()), kind)


@pytest.mark.parametrize("name", ODD)
def test_odd_tensor_round_trips_as_python_state(name: str) -> None:
    back = decode_blob(encode_blob(ODD[name]()))
    assert (raw(back), back.shape) == (raw(ODD[name]()), ODD[name]().shape)


def test_changed_inference_mode_buffer_is_detected() -> None:
    model = Holder(inferred())
    state = TrackedState({"model": model})
    state.tensors()
    with torch.inference_mode():
        model.held += 1
    assert not state.is_unchanged()


def test_fill_failure_of_one_rank_reaches_all_ranks(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier, a rank that raised alone left the others waiting until their timeout."""
    store_objects(rank, {"model": Holder(torch.ones(2))})
    spec = generation(2, ranks=[("n1", 0), ("n1", 1)], restore=RestoreRule())
    store = HashStore()
    read = Restorer._read

    def failing(self: Restorer, *args: Any) -> Any:
        if self._member.rank == 1:
            raise RuntimeError("one element refers to the memory of another")
        return read(self, *args)

    monkeypatch.setattr(Restorer, "_read", failing)
    raised: dict[int, Exception] = {}

    def restore(number: int) -> None:
        try:
            state = TrackedState({"model": Holder(torch.zeros(2))})
            Restoration(rank.client, spec, spec.roster[number], store).fill(state)
        except (NotRestorable, RuntimeError) as error:
            raised[number] = error

    threads = [threading.Thread(target=restore, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(raised[0], NotRestorable)
    assert str(raised[0]) == "rank 1: one element refers to the memory of another"
    assert type(raised[1]) is RuntimeError
