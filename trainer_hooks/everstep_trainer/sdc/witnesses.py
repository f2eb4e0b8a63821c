"""Choose the ranks that do a rank's work again, bring them its tensors, and say in words how results differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch
import torch.distributed as dist

from everstep_trainer.base.interrupt import wait_for_audit_messages
from everstep_trainer.parallel.lane import all_gather
from everstep_trainer.state.python_value_codec import dtype_of


def witnesses_of(owner: int, nodes: Sequence[str]) -> tuple[int | None, int | None]:
    """Return the peer and the arbiter for work of rank ``owner``; None where the job has too few ranks.

    The peer is the next rank.
    """
    world_size = len(nodes)
    if world_size < 2:
        return None, None
    peer = (owner + 1) % world_size
    return peer, choose_arbiter(owner, peer, world_size, nodes) if world_size > 2 else None


def choose_arbiter(
    owner: int, peer: int, world_size: int, nodes: Sequence[str], candidates: Collection[int] | None = None
) -> int:
    """Return the next rank after the peer on a third node; without one, the next rank that is neither of the two.

    Args:
        owner: The rank whose work is judged.
        peer: The other witness.
        world_size: The number of ranks.
        nodes: The node of each rank; empty if they are not known.
        candidates: The ranks that can be chosen, at least one besides owner and peer; None: all.
    """
    others = [rank for n in range(1, world_size) if (rank := (peer + n) % world_size) not in (owner, peer)]
    if candidates is not None:
        others = [rank for rank in others if rank in candidates]
    if len(nodes) == world_size:
        return next((rank for rank in others if nodes[rank] not in (nodes[owner], nodes[peer])), others[0])
    return others[0]


# ---- tensors from rank to rank

HEADER_WORDS = 512
"""The number of tensors, and then the bytes of each one, in a message of fixed size."""


def exchange(
    tensors: Sequence[torch.Tensor] | None, *, to: int | None, source: int | None, device: torch.device
) -> list[torch.Tensor]:
    """Send the bytes of flat tensors to rank ``to`` and return those that rank ``source`` sends, on ``device``.

    Args:
        tensors: Of one dimension each, at most 511.
        to: None: send nothing.
        source: None: receive nothing.
        device: The one that the default group communicates from.
    """
    payload = [_bytes(tensor, device) for tensor in tensors or ()]
    header = torch.tensor([len(payload), *(tensor.numel() for tensor in payload)], dtype=torch.int64)
    header = torch.nn.functional.pad(header, (0, HEADER_WORDS - header.numel())).to(device)
    announced = torch.zeros_like(header)
    _transfer([header], to, [announced], source)
    received: list[torch.Tensor] = []
    if source is not None:
        count, *sizes = announced.tolist()
        received = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes[:count]]
    _transfer(payload, to, received, source)
    return received


def _bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device)


def _transfer(
    sent: Sequence[torch.Tensor], to: int | None, received: Sequence[torch.Tensor], source: int | None
) -> None:
    """Transfer between pairs of ranks; empty tensors are skipped on both sides."""
    operations = []
    if to is not None:
        operations += [dist.P2POp(dist.isend, tensor, to) for tensor in sent if tensor.numel()]
    if source is not None:
        operations += [dist.P2POp(dist.irecv, tensor, source) for tensor in received if tensor.numel()]
    wait_for_audit_messages(dist.batch_isend_irecv(operations) if operations else ())


def all_gather_numbers(numbers: Sequence[int], world_size: int, device: torch.device) -> list[list[int]]:
    """Return the signed 64-bit numbers of each rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = own.new_empty(world_size * len(numbers))
    all_gather(gathered, own)
    found: list[list[int]] = gathered.view(world_size, -1).tolist()
    return found


class _TensorHeader(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    on_host: bool


class Parcel(msgspec.Struct, frozen=True):
    """Named tensors of one rank, and what they are: numbers for other ranks, and words for operators."""

    numbers: tuple[int, ...]
    tensors: dict[str, torch.Tensor]
    text: str = ""


class _Header(msgspec.Struct, frozen=True):
    numbers: tuple[int, ...]
    tensors: tuple[_TensorHeader, ...]
    text: str


def exchange_parcel(
    parcel: Parcel | None, *, to: int | None, source: int | None, device: torch.device
) -> Parcel | None:
    """Send a parcel to rank ``to`` and return the one that rank ``source`` sends; see `exchange`."""
    message: list[torch.Tensor] = []
    if parcel is not None:
        headers = tuple(
            _TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), not tensor.is_cuda)
            for name, tensor in parcel.tensors.items()
        )
        words = bytearray(msgspec.msgpack.encode(_Header(parcel.numbers, headers, parcel.text)))
        message = [torch.frombuffer(words, dtype=torch.uint8), *parcel.tensors.values()]
    received = exchange(message, to=to, source=source, device=device)
    if not received:
        return None
    header = msgspec.msgpack.decode(bytes(received[0].tolist()), type=_Header)
    tensors = {
        tensor.name: flat.to("cpu" if tensor.on_host else device).view(dtype_of(tensor.dtype)).view(tensor.shape)
        for tensor, flat in zip(header.tensors, received[1:], strict=True)
    }
    return Parcel(header.numbers, tensors, header.text)


# ---- differences in words


def describe_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return in words how ``found`` differs from a tensor of equal dtype; empty if no bit does.

    Args:
        found: The tensor, or its bytes.
        expected: What it should be.
    """
    size = expected.element_size()
    flat = expected.detach().cpu().contiguous().reshape(-1)
    got = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if got.numel() != flat.nbytes:
        return "its size differs"
    changed = (got ^ flat.view(torch.uint8)).view(-1, size)
    where = changed.any(dim=1).nonzero().reshape(-1)
    if not where.numel():
        return ""
    first = int(where[0])
    place = [int(n) for n in torch.unravel_index(torch.tensor(first), expected.shape)] if expected.ndim else []
    is_, was = got.view(flat.dtype)[first].item(), flat[first].item()
    bits = changed[first].flip(0).numpy().tobytes().hex()
    return (
        f"{where.numel()} of {flat.numel()} elements differ, the first at {place}: {is_!r} instead of {was!r}, "
        f"bits 0x{bits}"
    )
