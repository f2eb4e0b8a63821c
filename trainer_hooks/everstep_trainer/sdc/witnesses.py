"""Choose the ranks that do a rank's work again, and bring them its tensors, after two results of it differed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

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


def choose_arbiter(owner: int, peer: int, world_size: int, nodes: Sequence[str]) -> int:
    """Return the next rank after the peer on a third node; without one, the next rank that is neither of the two."""
    others = [rank for n in range(1, world_size) if (rank := (peer + n) % world_size) not in (owner, peer)]
    if len(nodes) == world_size:
        return next((rank for rank in others if nodes[rank] not in (nodes[owner], nodes[peer])), others[0])
    return others[0]


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


def broadcast_parcel(parcel: Parcel | None, source: int, device: torch.device) -> Parcel:
    """Return the parcel of rank ``source`` on all ranks. A collective of the default group.

    Args:
        parcel: The parcel; None on the other ranks.
        source: The rank that has it.
        device: This rank's device, for tensors that are not on the host.
    """
    header, payload = b"", torch.empty(0, dtype=torch.uint8, device=device)
    if parcel is not None:
        headers = tuple(
            _TensorHeader(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), not tensor.is_cuda)
            for name, tensor in parcel.tensors.items()
        )
        header = msgspec.json.encode(_Header(parcel.numbers, headers, parcel.text))
        flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in parcel.tensors.values()]
        payload = torch.cat([piece.to(device) for piece in flat]) if flat else payload
    sizes = torch.tensor([len(header), payload.numel()], device=device)
    dist.broadcast(sizes, src=source)
    header_bytes, payload_bytes = (int(size) for size in sizes.tolist())
    if parcel is None:
        payload = torch.empty(payload_bytes, dtype=torch.uint8, device=device)
        head = torch.empty(header_bytes, dtype=torch.uint8, device=device)
    else:
        head = torch.from_numpy(np.frombuffer(header, np.uint8).copy()).to(device)
    dist.broadcast(head, src=source)
    if payload_bytes:
        dist.broadcast(payload, src=source)
    if parcel is not None:
        return parcel
    decoded = msgspec.json.decode(head.cpu().numpy().tobytes(), type=_Header)
    tensors, at = {}, 0
    for one in decoded.tensors:
        made = torch.empty(one.shape, dtype=dtype_of(one.dtype), device="cpu" if one.on_host else device)
        made.view(-1).view(torch.uint8).copy_(payload[at : at + made.nbytes])
        tensors[one.name] = made
        at += made.nbytes
    return Parcel(decoded.numbers, tensors, decoded.text)


# ---- differences in words


def describe_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a sentence about the elements and bits in which two tensors of equal shape and dtype differ."""
    one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy() for tensor in (found, expected))
    size = found.element_size()
    changed = (one ^ other).reshape(-1, size)
    where = np.flatnonzero(changed.any(axis=1))
    if not len(where):
        return ""
    bits, first = int(np.unpackbits(changed).sum()), int(where[0])
    pattern = changed[first][::-1].tobytes().hex()
    return (
        f"{len(where)} of {found.numel()} elements differ, in {bits} bits; the first is element {first}: "
        f"{_shown(one, first, size)} instead of {_shown(other, first, size)}, bits 0x{pattern}"
    )


def _shown(data: np.ndarray[tuple[int], np.dtype[np.uint8]], index: int, size: int) -> str:
    return "0x" + data[index * size : (index + 1) * size][::-1].tobytes().hex()
