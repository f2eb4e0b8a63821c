"""Print what torch can do on this machine, as JSON: ``python -m everstep_trainer.torch_facts``.

``everstep doctor`` runs this in a child process, because it must not import torch itself, and a driver may hang.
"""

from __future__ import annotations

import msgspec

from everstep.doctor.accelerators import TorchFacts


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
    )


if __name__ == "__main__":
    print(msgspec.json.encode(read_torch()).decode())
