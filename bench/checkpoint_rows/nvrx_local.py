"""Local checkpoints of nvidia-resiliency-ext, in an environment of its own: seconds of saves and loads as JSON.

``python nvrx_local.py DIRECTORY TENSORS TENSOR_BYTES REPEATS``. Its own class for plain states asserts that tensors are
on a GPU, and its asynchronous save synchronizes one: so this is the synchronous save, of a class like that one for
tensors on the host. Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from torch._C._distributed_c10d import HashStore


class HostTensors(TensorAwareStateDict):  # type: ignore[misc]  # only installed for peers
    """A list of tensors that are on the host already, so that there is nothing to move."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def pop_tensors(self) -> list[torch.Tensor]:
        tensors, self._tensors = self._tensors, []
        return tensors

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    @property
    def is_hollow(self) -> bool:
        return not self._tensors

    def insert_tensors(self, tensor_data: list[torch.Tensor]) -> None:
        self._tensors = tensor_data

    def init_tensors(self) -> None:
        raise NotImplementedError("only replication needs it")

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        pass

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def main() -> None:
    directory, tensors, nbytes, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    state = [torch.full((nbytes // 4,), float(index)) for index in range(tensors)]
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    manager = LocalCheckpointManager(directory)
    saves, loads = [], []
    for step in range(1, repeats + 1):
        began = time.perf_counter()
        manager.save(HostTensors(state), step)
        saves.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert manager.find_latest() == step
        loaded, _ = manager.load()
        for mine, stored in zip(state, loaded.tensors, strict=True):
            mine.copy_(stored)
        loads.append(time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    print(json.dumps({"save": saves, "load": loads}))


if __name__ == "__main__":
    main()
