"""The main thread's torch state, put back after an interrupt.

An exception raised between two byte codes can hit the exit of a context manager just before it restores what it
changed: gradients stay off, or a checkpointed block's hooks stay installed. Such state belongs to the thread, not to
objects that go away, so the next generation would inherit it.
"""

from __future__ import annotations

import torch


def reset_thread_state() -> None:
    """Grad mode on, autocast off, no saved-tensor hooks, no determinism of a checkpoint's recomputation left over."""
    torch.set_grad_enabled(True)
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    _drop_saved_tensor_hooks()


def _drop_saved_tensor_hooks() -> None:
    """torch has no public way to look at this stack; a version without these functions keeps what it has."""
    autograd = torch._C._autograd
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return
    while top(True) is not None:
        autograd._pop_saved_tensors_default_hooks()
