"""Trains a byte-level GPT with Ray Train, on workers whose ranks and actors may be killed.

    python examples/train_ray.py --workers 2 --ranks 2

Starts a Ray of its own on this machine, or joins the one that RAY_ADDRESS names.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import torch
import xxhash
from ray.train.torch import TorchTrainer

from everstep_trainer.integrations.ray import EverstepConfig  # everstep

sys.path.insert(0, str(Path(__file__).parent))
from corpus import Windows, standard_library
from gpt import GPT, GPTConfig, next_byte_loss

import everstep  # everstep


def loop(config: dict[str, float]) -> None:
    steps, pace = int(config["steps"]), config["pace"]

    def train(run: everstep.Run) -> None:  # everstep
        torch.manual_seed(17)
        dataset = Windows(standard_library(), 64)
        model = GPT(GPTConfig(layers=2, width=64, context=64)).to(run.device)
        replicas = run.replicate(model)  # everstep: instead of ray.train.torch.prepare_model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler = run.sampler(len(dataset), global_batch=8, seed=17)  # everstep
        run.track(model=replicas, optimizer=optimizer)  # everstep
        loss = torch.tensor(float("nan"))  # if a restored run has no step left
        for step in run.steps(until=steps, seed=17):  # everstep
            inputs, targets = (part.to(run.device) for part in dataset[sampler.indices(step)])
            optimizer.zero_grad()
            loss = next_byte_loss(replicas(inputs), targets)
            (loss * sampler.loss_weight(step)).backward()
            optimizer.step()
            time.sleep(pace)
            if step % 20 == 0:
                ray.train.report({"step": step, "loss": loss.item()})
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder) / "model.pt")
            ray.train.report({"step": steps, "loss": loss.item()}, checkpoint=ray.train.Checkpoint(folder))

    everstep.main(train)  # everstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--workers", type=int, default=2, help="Ray workers, each one node of the job")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a worker")
    arguments = parser.parse_args()
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=arguments.workers, include_dashboard=False, object_store_memory=100 << 20)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": arguments.steps, "pace": arguments.pace},
        torch_config=EverstepConfig(ranks_per_worker=arguments.ranks),  # everstep
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=100)),
    )
    result = trainer.fit()
    assert result.metrics is not None
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        parameters = torch.load(Path(folder) / "model.pt")
    digest = xxhash.xxh64()
    for name in sorted(parameters):
        digest.update(parameters[name].numpy().tobytes())
    ray.shutdown()
    print(f"final step={result.metrics['step']} loss={result.metrics['loss']:.9g} parameters={digest.hexdigest()}")


if __name__ == "__main__":
    main()
