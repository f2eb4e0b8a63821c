"""A GPT of Megatron-core in a training function, whose ranks log each step.

    everstep-launch ... -m tests.integration.frameworks.scripts.megatron_training FOLDER UNTIL [RANK:STEP:POINT ...]

MEGATRON_LAYOUTS: a JSON list of layouts with "tp", "pp", "bf16" and "distributed" (the optimizer), one for each
generation. Later generations have the last layout. Megatron's tensors are on the host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import everstep
from everstep_trainer.integrations.megatron import MegatronState, initialize_megatron, seeded_steps, track_megatron
from examples import megatron_on_cpu  # noqa: F401 - has Megatron's tensors on the host
from tests.support.ranks.exact_training import SEED, Fault, FaultInjector, StepLog, fingerprint, main, wait_at_gate

BATCH, MICRO, LENGTH, VOCABULARY = 12, 2, 8, 64
Layout = dict[str, Any]
LAYOUTS: list[Layout] = json.loads(os.environ.get("MEGATRON_LAYOUTS", "[{}]"))


def layout_of(generation: int) -> Layout:
    return {"tp": 1, "pp": 1, "bf16": False, "distributed": True} | LAYOUTS[min(generation, len(LAYOUTS)) - 1]


def build(layout: Layout) -> DistributedDataParallel:
    """Return this rank's part of a gated GPT with embeddings tied over the pipeline stages."""
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if layout["bf16"] else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=layout["bf16"],
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(dtype)
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=layout["distributed"], grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, data_parallel, model)


def forward_step(batches: Iterator[torch.Tensor], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=tokens.roll(-1, 1))

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses.float().mean()
        return loss, loss.detach().clone()

    return output, loss_of


def fingerprint_of_state(state: MegatronState) -> str:
    """Return a digest of all full tensors, equal on every rank and in every layout."""
    mine = [(shard.name, shard.shape, shard.box, shard.local.float()) for shard in state.shards()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, box, local in (shard for of_rank in every for shard in of_rank):
        tensor = whole.setdefault(name, torch.full(shape, torch.nan))
        tensor[tuple(slice(at, at + n) for at, n in zip(box.offset, box.size, strict=True))] = local
    assert not any(tensor.isnan().any() for tensor in whole.values()), "an element is on no rank"
    return fingerprint(whole[name] for name in sorted(whole))


def train(run: everstep.Run, folder: str, until: int, faults: Sequence[Fault]) -> None:
    torch.set_num_threads(1)
    layout = layout_of(run.generation)
    initialize_megatron(run, tensor_model_parallel_size=layout["tp"], pipeline_model_parallel_size=layout["pp"])
    model = build(layout)
    options = OptimizerConfig(
        lr=1e-2, min_lr=1e-4, clip_grad=0.5, bf16=layout["bf16"], use_distributed_optimizer=layout["distributed"]
    )
    optimizer = get_megatron_optimizer(options, [model])
    decay = {"start_wd": 0.01, "end_wd": 0.1, "wd_incr_steps": 30, "wd_incr_style": "linear"}
    rates = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-4, "lr_decay_style": "cosine"}
    schedule = OptimizerParamScheduler(optimizer, lr_warmup_steps=3, lr_decay_steps=30, **rates, **decay)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (200, LENGTH), generator=generator)
    sampler = run.sampler(len(tokens), global_batch=BATCH, seed=SEED)
    state = MegatronState([model], optimizer)
    track_megatron(run, [model], optimizer, schedule)
    step_log, injector = StepLog(Path(folder), run), FaultInjector(faults, Path(folder), run.rank)
    if run.last_finished_step:
        step_log.write(run.last_finished_step, restored=fingerprint_of_state(state), world=run.world_size)
    for step in seeded_steps(run, until=until, seed=SEED):
        wait_at_gate(Path(folder), step)
        injector.step = step
        injector.at("begun")
        model.zero_grad_buffer()
        optimizer.zero_grad()
        samples = sampler.indices(step)
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens[samples].split(MICRO)),
            model=model,
            num_microbatches=len(samples) // MICRO,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        injector.at("reduced")
        _, norm, _ = optimizer.step()
        schedule.step(1)
        injector.at("updated")
        loss = run.mean(torch.stack(losses).mean() if losses else None)
        step_log.write(
            step,
            loss=float(loss).hex(),
            norm=float(norm).hex(),
            rate=float(optimizer.param_groups[0]["lr"]).hex(),
            samples=samples.tolist(),
            state=fingerprint_of_state(state),
        )


if __name__ == "__main__":
    main(train, sys.argv[1:])
