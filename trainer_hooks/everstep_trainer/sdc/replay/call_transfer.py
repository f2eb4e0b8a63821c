"""Send tensors and captured calls from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from everstep_trainer.parallel.exact.summation import all_gather
from everstep_trainer.sdc.replay.capture import CapturedCall, Snapshot, TensorLayout, UnsupportedUnit

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
    header = torch.tensor([len(payload), *(one.numel() for one in payload)], dtype=torch.int64)
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
        operations += [dist.P2POp(dist.isend, one, to) for one in sent if one.numel()]
    if source is not None:
        operations += [dist.P2POp(dist.irecv, one, source) for one in received if one.numel()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def all_gather_numbers(numbers: Sequence[int], world_size: int, device: torch.device) -> list[list[int]]:
    """Return the signed 64-bit numbers of each rank."""
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    gathered = own.new_empty(world_size * len(numbers))
    all_gather(gathered, own)
    found: list[list[int]] = gathered.view(world_size, -1).tolist()
    return found


# ---- captured calls


class _CallHeader(msgspec.Struct, frozen=True):
    """The layouts of the tensors of a captured call, in the order in which they follow."""

    inputs: list[TensorLayout]
    gradients: list[TensorLayout | None]
    buffers: dict[str, TensorLayout]
    digests: list[int | None]


def encode_call(captured: CapturedCall) -> list[torch.Tensor]:
    """Return what another rank needs to do a call again, besides its own capture of the same structure."""
    gradients = captured.output_gradients
    digests = captured.record.digests
    known = [digest for digest in digests if digest is not None]
    values = iter(torch.stack(known).tolist() if known else [])  # one wait for the device
    header = _CallHeader(
        inputs=[one.layout for one in captured.inputs],
        gradients=[None if one is None else one.layout for one in gradients],
        buffers={name: one.layout for name, one in captured.buffers.items()},
        digests=[None if digest is None else next(values) for digest in digests],
    )
    words = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
    snapshots = [*captured.inputs, *(one for one in gradients if one is not None), *captured.buffers.values()]
    return [words, *(one.flat for one in snapshots), *captured.rng]


def decode_call(tensors: Sequence[torch.Tensor], own: CapturedCall, device: torch.device) -> CapturedCall:
    """Return the call of another rank from what it sent. ``own``: this rank's capture of the same structure.

    The record of the returned call holds the digests that the other rank claims.

    Raises:
        UnsupportedUnit: The message cannot be read.
    """
    try:
        header = msgspec.msgpack.decode(bytes(tensors[0].tolist()), type=_CallHeader)
        rest = iter(tensors[1:])
        inputs = [_snapshot(next(rest), layout, device) for layout in header.inputs]
        gradients = [None if one is None else _snapshot(next(rest), one, device) for one in header.gradients]
        buffers = {name: _snapshot(next(rest), layout, device) for name, layout in header.buffers.items()}
        rng = tuple(one.cpu() for one in rest)
    except (msgspec.MsgspecError, StopIteration, RuntimeError, IndexError) as error:
        raise UnsupportedUnit(f"what another rank sent cannot be read: {error}") from None
    claims = own.record.with_digests([None if one is None else torch.tensor(one) for one in header.digests])
    return CapturedCall(
        inputs=inputs,
        leaves=own.leaves,
        spec=own.spec,
        buffers=buffers,
        rng=rng,
        forward_autocast=own.forward_autocast,
        backward_autocast=own.backward_autocast,
        grad_enabled=own.grad_enabled,
        modes=own.modes,
        record=claims,
        output_gradients=list(gradients),
    )


def _snapshot(flat: torch.Tensor, layout: TensorLayout, device: torch.device) -> Snapshot:
    place = torch.device("cpu") if layout.is_host else device
    return Snapshot(flat.to(place).view(getattr(torch, layout.dtype)), layout)
