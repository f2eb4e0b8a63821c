"""Turn captured calls into tensors that go from rank to rank, and back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from everstep_trainer.sdc.replay.capture import CapturedCall, Snapshot, TensorLayout, UnsupportedUnit


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
        inputs=[value.layout for value in captured.inputs],
        gradients=[None if gradient is None else gradient.layout for gradient in gradients],
        buffers={name: buffer.layout for name, buffer in captured.buffers.items()},
        digests=[None if digest is None else next(values) for digest in digests],
    )
    words = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
    snapshots = [
        *captured.inputs,
        *(gradient for gradient in gradients if gradient is not None),
        *captured.buffers.values(),
    ]
    return [words, *(snapshot.flat for snapshot in snapshots), *captured.rng]


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
        gradients = [
            None if gradient is None else _snapshot(next(rest), gradient, device) for gradient in header.gradients
        ]
        buffers = {name: _snapshot(next(rest), layout, device) for name, layout in header.buffers.items()}
        rng = tuple(state.cpu() for state in rest)
    except (msgspec.MsgspecError, StopIteration, RuntimeError, IndexError) as error:
        raise UnsupportedUnit(f"what another rank sent cannot be read: {error}") from None
    claims = own.record.with_digests([None if digest is None else torch.tensor(digest) for digest in header.digests])
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
