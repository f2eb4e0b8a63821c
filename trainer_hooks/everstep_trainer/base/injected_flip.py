"""Flip one bit of a parameter on request, as silent corruption that ``everstep chaos flip`` brings about.

The request is a signal, so only the job's user and root can make it. The bit is flipped right before the tracked
optimizer's next update. The state is consistent then, no copy of it is in progress, and autograd is done with the
parameter's old value.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading

import torch
from torch.distributed.tensor import DTensor

from everstep.chaos.targets import FLIP_SIGNAL
from everstep_trainer.launch.assignment import ALLOW_BIT_FLIPS_VARIABLE

log = logging.getLogger(__name__)

_is_requested = False


def accept_requests() -> bool:
    """Install the signal's handler if the job allows it; return whether it is installed. For the main thread."""
    allowed = os.environ.get(ALLOW_BIT_FLIPS_VARIABLE) == "1"
    if not allowed or threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(FLIP_SIGNAL, _request)
    return True


def _request(number: int, frame: object) -> None:
    global _is_requested  # one per process, like the handler
    _is_requested = True


def flip_if_requested(optimizer: torch.optim.Optimizer) -> bool:
    """Flip a bit of a parameter of ``optimizer`` if that was requested since the last call; return whether it was."""
    global _is_requested
    if not _is_requested:
        return False
    _is_requested = False
    parameters = (p.to_local() if isinstance(p, DTensor) else p for g in optimizer.param_groups for p in g["params"])
    fitting = [
        parameter.detach()
        for parameter in parameters
        if parameter.numel() and parameter.is_floating_point() and parameter.is_contiguous()
    ]
    if not fitting:
        log.warning("everstep chaos flip: the optimizer has no parameter whose bits can be flipped here")
        return False
    largest = max(fitting, key=torch.Tensor.numel)
    log.warning("everstep chaos flip: %s", flip_bit(largest))
    return True


def flip_bit(tensor: torch.Tensor) -> str:
    """Flip the lowest bit of the exponent of the element with the largest magnitude; return a sentence about it.

    The element is doubled or halved, so that no rounding of an update hides the change. ``tensor`` must be contiguous.
    """
    flat = tensor.view(-1)
    # Of the largest and the smallest: abs() would copy the whole tensor.
    index = max(int(flat.argmax()), int(flat.argmin()), key=lambda one: abs(float(flat[one])))
    before = float(flat[index])
    bit = round(-math.log2(torch.finfo(tensor.dtype).eps))  # the mantissa's bits are below it
    with torch.no_grad():
        flat[index : index + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return f"bit {bit} of element {index} of a tensor of shape {list(tensor.shape)}: {before:g} is now {flat[index]:g}"
