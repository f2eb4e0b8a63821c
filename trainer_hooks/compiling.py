"""How long torch.compile has compiled in this process."""

from __future__ import annotations

import sys

_COUNTED = ("entire_frame_compile", "entire_backward_compile")


def compiled_since(before_s: float) -> float:
    """Seconds since ``compiled_s`` returned ``before_s``; ``torch.compiler.reset`` in between begins at zero."""
    now_s = compiled_s()
    return now_s - before_s if now_s >= before_s else now_s


def compiled_s() -> float:
    """Seconds of all compilations so far, forward and backward; 0.0 where torch does not say.

    Looking up a compiled graph in torch's cache counts as compiling it.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # what has not been imported has compiled nothing
    if utils is None or not hasattr(utils, "calculate_time_spent"):
        return 0.0
    spent = utils.calculate_time_spent()
    return float(sum(spent.get(name, 0.0) for name in _COUNTED))
