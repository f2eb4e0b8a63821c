"""Changes of parameters, gradients and generators by ordinary scripts, besides an optimizer's update."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

import everstep
from bench.calm.program import Diary, pause
from bench.calm.programs.catalogue import CATALOGUE
from bench.calm.training import BATCH, FEATURES, SAMPLES, STEP_S, SmallTraining, small_model

STEPS = 80


@CATALOGUE.add("A tracked average of the weights, updated under no_grad.")
def average_by_no_grad(run: everstep.Run, diary: Diary) -> None:
    average = copy.deepcopy(small_model())
    training = SmallTraining(run, diary, average=average)
    for _ in training.steps(STEPS):
        with torch.no_grad():
            for mean, value in zip(average.parameters(), training.model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
    training.finish(average)


@CATALOGUE.add("An average of the weights by .data, which is swapped in for a validation every 20 steps.")
def average_swapped_by_data(run: everstep.Run, diary: Diary) -> None:
    average = copy.deepcopy(small_model())
    training = SmallTraining(run, diary, average=average)
    parameters, means = list(training.model.parameters()), list(average.parameters())
    for step in training.steps(STEPS):
        for mean, value in zip(means, parameters, strict=True):
            mean.data.mul_(0.9).add_(value.data, alpha=0.1)
        if step % 20 == 0:
            own = [value.data.clone() for value in parameters]
            for value, mean in zip(parameters, means, strict=True):
                value.data.copy_(mean.data)
            pause(0.3)
            for value, kept in zip(parameters, own, strict=True):
                value.data.copy_(kept)
    training.finish(average)


@CATALOGUE.add("Weights are clipped through .data after each update.")
def weight_clipping_by_data(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for _ in training.steps(STEPS):
        for value in training.model.parameters():
            value.data.clamp_(-0.2, 0.2)
    training.finish()


@CATALOGUE.add("Hooks that halve gradients, registered in each step and removed after the backward pass.")
def gradient_hooks_of_a_step(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=STEPS, seed=1):
        hooks = [value.register_hook(lambda gradient: gradient * 0.5) for value in training.model.parameters()]
        loss = training.backward(step)
        for hook in hooks:
            hook.remove()
        training.update(step, loss)
    training.finish()


@CATALOGUE.add("Hooks that log gradients, registered once; gradients are clipped before the update.")
def gradient_logging_and_clipping(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    norms: list[float] = []
    for value in training.model.parameters():
        value.register_post_accumulate_grad_hook(lambda value: norms.append(value.grad.norm().item()))
    for step in run.steps(until=STEPS, seed=1):
        loss = training.backward(step)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.update(step, loss)
    training.finish()


@CATALOGUE.add("Two models with an optimizer each, updated in turns; the critic's weights are clipped.")
def gan(run: everstep.Run, diary: Diary) -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, FEATURES))
    critic = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))
    makers, critics = run.replicate(maker), run.replicate(critic)
    make = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judge = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=1)
    real = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(2)) + 1
    run.track(maker=makers, critic=critics, maker_optimizer=make, critic_optimizer=judge)
    for step in run.steps(until=STEPS, seed=1):
        samples = real[sampler.indices(step)]
        noise = torch.randn(len(samples), 8)
        judge.zero_grad()
        loss = critics(makers(noise).detach()).mean() - critics(samples).mean()
        loss.backward()
        judge.step()
        for value in critic.parameters():
            value.data.clamp_(-0.05, 0.05)
        if step % 2 == 0:
            make.zero_grad()
            (-critics(makers(noise)).mean()).backward()
            make.step()
        diary.loss(step, loss)
        pause(STEP_S)
    diary.final(maker, critic)


@CATALOGUE.add("Gradients of four parts of a batch are added up under no_sync.")
def gradient_accumulation(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    for step in run.steps(until=STEPS, seed=1):
        *first, last = training.sampler.indices(step).chunk(4)
        with training.replicas.no_sync():  # type: ignore[operator]
            for part in first:
                nn.functional.mse_loss(training.replicas(training.inputs[part]), training.targets[part]).backward()
        loss = nn.functional.mse_loss(training.replicas(training.inputs[last]), training.targets[last])
        loss.backward()
        training.update(step, loss)
    training.finish()


@CATALOGUE.add("From step 30 on layers compute with quantised inputs and weights.")
def fake_quantisation(run: everstep.Run, diary: Diary) -> None:
    def quantised(value: torch.Tensor) -> torch.Tensor:
        return value + ((value * 16).round() / 16 - value).detach()

    class Layer(nn.Linear):
        is_quantised = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_quantised:
                return super().forward(x)
            return nn.functional.linear(quantised(x), quantised(self.weight), self.bias)

    torch.manual_seed(0)
    training = SmallTraining(run, diary, nn.Sequential(Layer(FEATURES, 64), nn.ReLU(), Layer(64, 1)))
    for step in run.steps(until=STEPS, seed=1):
        Layer.is_quantised = step >= 30
        training.learn(step)
    training.finish()


@CATALOGUE.add("Batch normalization, whose statistics change in each forward pass.")
def batch_norm(run: everstep.Run, diary: Diary) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)]
    training = SmallTraining(run, diary, nn.Sequential(*layers))
    training.train(STEPS)
    training.finish()


@CATALOGUE.add("Noise from a torch.Generator of the script's own, tracked.")
def own_generator(run: everstep.Run, diary: Diary) -> None:
    noise = torch.Generator().manual_seed(7)
    training = SmallTraining(run, diary, noise=noise)
    for step in run.steps(until=STEPS, seed=1):
        with torch.no_grad():
            training.inputs[training.sampler.indices(step)] += 0.01 * torch.randn(1, generator=noise)
        training.learn(step)
    training.finish()


@contextlib.contextmanager
def _own_checkpoint(folder: Path) -> Iterator[Mapping[str, str]]:
    torch.manual_seed(5)
    model = small_model()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5)
    torch.save(model.state_dict(), folder / "own.pt")
    yield {}


@CATALOGUE.add("The script loads a checkpoint of its own after run.track.", beside=_own_checkpoint)
def own_resume_after_track(run: everstep.Run, diary: Diary) -> None:
    training = SmallTraining(run, diary)
    if run.last_finished_step == 0:
        training.model.load_state_dict(torch.load(diary.folder / "own.pt"))
    training.train(STEPS)
    training.finish()
