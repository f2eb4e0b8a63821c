"""One JSON line per finished step: what the loss curve and the account of samples are drawn from."""

from __future__ import annotations

import json

import torch

import everstep


class Metrics:
    """Writes to ``path`` from rank 0; idle without a path.

    A step that is computed again in a later generation is written again: of lines with one step, the last counts.
    """

    def __init__(self, path: str | None, run: everstep.Run, sampler: everstep.ElasticSampler) -> None:
        self._path = path
        self._run = run
        self._sampler = sampler

    def write(self, step: int, loss: torch.Tensor) -> None:
        """After the optimizer's step. ``loss`` is this rank's mean; the line has the mean over all samples."""
        if self._path is None:
            return
        mean = self._run.mean(loss, self._sampler.loss_weight(step)).item()
        if self._run.rank != 0:
            return
        line = {
            "step": step,
            "loss": mean,
            "generation": self._run.generation,
            "world_size": self._run.world_size,
            "samples": self._sampler.global_indices(step).tolist(),
        }
        with self._run.atomic(), open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
