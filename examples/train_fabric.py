"""Trains a classifier with a loop over Lightning Fabric.

    python examples/train_fabric.py                      one process, nothing else
    everstep-launch --nproc-per-node 2 examples/train_fabric.py          two that survive

The lines that Everstep needs are marked.
"""

from __future__ import annotations

import argparse
import time

import torch
from final_line import print_final
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import everstep  # everstep
from everstep_trainer.integrations.fabric import everstep_strategy, track  # everstep

SAMPLES, FEATURES, CLASSES, BATCH = 256, 16, 4, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="updates in all")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


ARGS = arguments()


class Classifier(torch.nn.Module):
    """Two layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, CLASSES)
        )
        self.register_buffer("loss", torch.zeros(()))  # of the last update

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
        self.loss = loss.detach().clone()
        return loss


def data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def train(run: everstep.Run) -> None:  # everstep
    torch.set_num_threads(1)
    torch.manual_seed(17)
    fabric = Fabric(strategy=everstep_strategy(run))  # everstep
    fabric.launch()
    classifier = Classifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ARGS.steps)
    model, optimizer = fabric.setup(classifier, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH, shuffle=True))
    loader = track(fabric, run, loader, model=model, optimizer=optimizer, schedule=schedule)  # everstep
    for _ in loader.epochs(max_steps=ARGS.steps):  # everstep
        for inputs, targets in loader:
            time.sleep(ARGS.pace)
            fabric.backward(model(inputs, targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    print_final(run.rank, run.last_finished_step, classifier.loss, classifier)


if __name__ == "__main__":
    everstep.main(train)  # everstep
