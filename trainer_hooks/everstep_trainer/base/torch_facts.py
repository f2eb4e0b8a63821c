"""Print what torch can do on this machine, as JSON: ``python -m everstep_trainer.base.torch_facts``.

``everstep doctor`` runs this in a child process, because it must not import torch itself, and a driver may hang.
"""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.doctor.accelerators import TorchFacts


def uses_nccl2(distributed: Any) -> bool:
    """Return whether torch's name "nccl" stands for nccl2, by what is registered for it rather than by a version.

    Args:
        distributed: The module ``torch.distributed``.
    """
    backend = getattr(distributed, "Backend", None)
    register = getattr(backend, "_ensure_backend_registered", None)  # torch 2.14 registers a backend at its first use
    if register is not None:
        register("nccl")
    plugins = getattr(backend, "_plugins", {})  # torch 2.13 and older have no entry
    creator = getattr(plugins.get("NCCL"), "creator_fn", None)
    return "nccl2" in getattr(creator, "__name__", "")


def read_torch() -> TorchFacts:
    """Return the facts; an import error becomes a fact."""
    try:
        import torch  # the facts are also about whether this works
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    devices, problem = 0, ""
    if torch.version.cuda is not None or torch.version.hip is not None:
        try:
            torch.cuda.current_device()  # initializes CUDA, and raises the driver's error
            devices = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:
            problem = str(error).splitlines()[0]
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        devices=devices,
        device_error=problem,
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        has_nccl=dist.is_available() and dist.is_nccl_available(),
        uses_nccl2=uses_nccl2(dist),
    )


if __name__ == "__main__":
    print(msgspec.json.encode(read_torch()).decode())
