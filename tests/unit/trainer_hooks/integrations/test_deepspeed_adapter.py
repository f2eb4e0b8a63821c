"""Parts of the adapter for DeepSpeed that need no ranks: pieces of parameters, batch sizes, process-wide state."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.processes.fork_pool import ForkPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks("deepspeed"),
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed's own: torch's deprecations
]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_pieces_hold_each_element_once(world: int) -> None:
    from everstep_trainer.integrations.adapter_parts.deepspeed_partitions import cut, in_sequence

    parameters = [nn.Parameter(torch.empty(size)) for size in (5, 1, 12, 3)]
    names: dict[torch.Tensor, str] = {parameter: f"p{number}" for number, parameter in enumerate(parameters)}
    size = -(-sum(p.numel() for p in parameters) // world)
    found = [
        (piece.name, piece.start + at, rank, piece.offset + at)
        for rank in range(world)
        for piece in cut(in_sequence(parameters, names), rank * size, (rank + 1) * size)
        for at in range(piece.length)
    ]
    elements = [(names[p], at) for p in parameters for at in range(p.numel())]
    assert [(name, at) for name, at, _, _ in found] == elements
    assert [rank * size + offset for _, _, rank, offset in found] == list(range(len(elements)))


def test_configuration_fits_every_world_size() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    from everstep_trainer.integrations.deepspeed import reset_deepspeed

    given = {"train_batch_size": 24, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    for world, share in ((1, 12), (3, 4), (5, 3)):
        run = Run(RankContext(world_size=world), TrainingSession())
        config = reset_deepspeed(run, given, global_batch=12)
        config["zero_optimization"]["stage"] = 3
        assert config["train_micro_batch_size_per_gpu"] == share
        assert "train_batch_size" not in config
        assert given["zero_optimization"] == {"stage": 2}, "the given one is not changed"
        assert DeepSpeedConfig(config, mesh_device=SimpleNamespace(size=lambda _=None, n=world: n))


def reset_after_interrupt() -> tuple[bool, int, int, int]:
    """Interrupt the building of a model under zero.Init, reset, and return what remains of it."""
    from deepspeed import comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters

    from everstep_trainer.integrations.deepspeed import reset_process_state

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    os.environ["LOCAL_RANK"] = "0"
    reset_process_state()  # without it DeepSpeed compiles its collectives in shared memory
    original = nn.Linear.__init__
    comm.comm.init_distributed("gloo")
    partition_parameters.Init(dtype=torch.float32).__enter__()
    assert nn.Linear.__init__ is not original
    partition_parameters.Init.param_id = 7
    parameter_offload.FWD_MODULE_STACK.append(None)
    comm.comm.timers("all_reduce").start()
    reset_process_state()
    comm.comm.timers("all_reduce").start()
    return (
        nn.Linear.__init__ is original,
        partition_parameters.zero_init_context,
        partition_parameters.Init.param_id,
        len(parameter_offload.FWD_MODULE_STACK),
    )


def test_reset_ends_an_interrupted_zero_init(forks: ForkPool) -> None:
    assert forks.start(reset_after_interrupt).result() == (True, 0, 0, 0)


def engines_left(stages: list[int]) -> list[bool]:
    """Build, train and drop an engine of each stage. Return whether its module still exists after the next reset."""
    import deepspeed

    from everstep_trainer.integrations.deepspeed import reset_process_state, tracked_objects

    def train(stage: int) -> weakref.ref[nn.Module]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": None,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        assert len(list(tracked_objects(engine)["deepspeed"].shards())) == 4 * 3
        return weakref.ref(model)

    os.environ["LOCAL_RANK"] = "0"
    left = []
    for stage in stages:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        reset_process_state()
        trained = train(stage)
        dist.destroy_process_group()
        gc.collect()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        reset_process_state()
        left.append(trained() is not None)
        dist.destroy_process_group()
    return left


def test_reset_frees_engines_of_the_generation_before(forks: ForkPool) -> None:
    assert forks.start(engines_left, [1, 2, 3]).result() == [False, False, False]
