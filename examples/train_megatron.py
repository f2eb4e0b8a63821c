"""Trains a byte-level GPT with Megatron-core: data, tensor and pipeline parallelism, and its distributed optimizer.

    torchrun --nproc-per-node 2 examples/train_megatron.py                                        two replicas
    python -m everstep_trainer.launch --nproc-per-node 2 examples/train_megatron.py               two that survive
    python -m everstep_trainer.launch --nproc-per-node 4 examples/train_megatron.py --pp 2        two pipelines

The lines that Everstep needs are marked ``# everstep``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import megatron_on_cpu  # noqa: F401 - first: without a GPU, Megatron's tensors go to host memory
import torch
import torch.distributed as dist
import xxhash
from corpus import Windows, standard_library
from final_line import print_line
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import everstep
from everstep_trainer.integrations.megatron import initialize_megatron, seeded_steps, track_megatron

SEED = 17
CONTEXT = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="updates in all")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--plain-optimizer", action="store_true", help="optimizer state whole on each replica")
    parser.add_argument("--batch", type=int, default=12, help="samples of an update, over all replicas")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples of a forward pass")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


ARGS = arguments()
WINDOWS = Windows(standard_library(), CONTEXT)
BF16 = ARGS.dtype == "bf16"


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One window of the corpus per index, as inputs and targets."""

    def __len__(self) -> int:
        return len(WINDOWS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = WINDOWS[torch.tensor([index])]
        return inputs[0], targets[0]


def build(device: torch.device) -> DistributedDataParallel:
    """Return this rank's part of the model."""
    torch.manual_seed(SEED)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=ARGS.dropout,
        attention_dropout=ARGS.dropout,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if BF16 else torch.float32,
        bf16=BF16,
        tensor_model_parallel_size=ARGS.tp,
        pipeline_model_parallel_size=ARGS.pp,
        pipeline_dtype=torch.bfloat16 if BF16 else torch.float32,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(device, config.params_dtype)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=not ARGS.plain_optimizer, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, ddp_config, model)


def micro_batches(batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> Iterator[Any]:
    return zip(*(each.to(device).split(ARGS.micro_batch) for each in batch), strict=True)


def forward_step(batches: Iterator[Any], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
    tokens, targets = next(batches)
    positions = torch.arange(CONTEXT, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens, positions, mask, labels=targets)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses.float().mean()
        return loss, loss.detach().clone()  # the schedule divides the loss in place

    return output, loss_of


class LastLoss:
    """The mean loss of the last update, tracked so that it survives a loss after that update."""

    value = float("nan")

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, stored: dict[str, float]) -> None:
        self.value = stored["value"]


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the parameters of a replica's ranks, in the order of names. A collective."""
    mine = {
        (name, dist.get_rank()): parameter.detach().cpu().view(torch.uint8).numpy().tobytes()
        for name, parameter in model.named_parameters()
        if parallel_state.get_data_parallel_rank() == 0
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    merged = {key: value for held in every for key, value in held.items()}
    return xxhash.xxh64_hexdigest(b"".join(merged[key] for key in sorted(merged)))


def train(run: everstep.Run) -> None:  # everstep
    torch.set_num_threads(1)
    initialize_megatron(run, tensor_model_parallel_size=ARGS.tp, pipeline_model_parallel_size=ARGS.pp)  # everstep
    model = build(run.device)
    adam = OptimizerConfig(
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=BF16,
        use_distributed_optimizer=not ARGS.plain_optimizer,
    )
    optimizer = get_megatron_optimizer(adam, [model])
    rates = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine"}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 1, "wd_incr_style": "constant"}
    schedule = OptimizerParamScheduler(optimizer, lr_warmup_steps=10, lr_decay_steps=1000, **rates, **decay)
    loader = run.loader(Samples(), global_batch=ARGS.batch, seed=SEED)  # everstep
    last = LastLoss()
    track_megatron(run, [model], optimizer, schedule, last=last)  # everstep
    forward_backward = get_forward_backward_func()
    share = ARGS.batch // parallel_state.get_data_parallel_world_size()
    for step in seeded_steps(run, until=ARGS.steps, seed=SEED):  # everstep
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=micro_batches(loader.batch(step), run.device),  # everstep
            model=model,
            num_microbatches=share // ARGS.micro_batch,
            seq_length=CONTEXT,
            micro_batch_size=ARGS.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        schedule.step(1)
        last.value = run.mean(torch.stack(losses).mean() if losses else None).item()  # everstep
        run.report(loss=last.value)
        time.sleep(ARGS.pace)
    print_line(run.rank, ARGS.steps, last.value, digest(model))


if __name__ == "__main__":
    everstep.main(train)  # everstep
