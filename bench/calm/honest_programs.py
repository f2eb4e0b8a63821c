"""Programs that compute rightly in ways that audits may take for faults."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from bench.calm.audited_training import BATCH, CLASSES, WIDTH, AuditedTraining, mlp

Train = Callable[[AuditedTraining], None]


@dataclass(frozen=True)
class Honest:
    """A program that computes rightly.

    Attributes:
        name: Name in the table.
        sentence: What it does.
        train: The training function.
        environment_of_last_rank: Variables of the last rank's process.
    """

    name: str
    sentence: str
    train: Train
    environment_of_last_rank: Mapping[str, str] = field(default_factory=dict)


HONEST: dict[str, Honest] = {}


def honest(sentence: str, **options: Any) -> Callable[[Train], Train]:
    """Return a decorator that adds a program under its own name."""

    def added(train: Train) -> Train:
        HONEST[train.__name__] = Honest(train.__name__, sentence, train, **options)
        return train

    return added


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Compute gradients, update the parameters, and clear the gradients."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def learn(training: AuditedTraining, replicas: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train the usual loop."""
    for _ in training.steps():
        update(training.loss(replicas), optimizer)


# ---- models


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        tokens = x[:, :4].abs().mul(3).long() % CLASSES
        return self.head(torch.tanh(self.layer(self.embedding(tokens).mean(1))))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.cells(x.unflatten(1, (4, 16)))[0][:, -1])


class _Carried(_Recurrent):
    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        outputs, state = self.cells(x.unflatten(1, (4, 16)), self.state)
        self.state = state.detach()
        return self.head(outputs[:, -1])


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-2, 2) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 2 * (x.abs() <= 2)


class _Layer(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).softmax(-1)
        best = chosen.argmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            rows = best == number
            out[rows] = expert(x[rows]) * chosen[rows, number : number + 1]
        return out


class _SometimesLeftOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(x) * float(random.random() < 0.5)


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self._reentrant = mlp(nn.Dropout(0.2)), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inner[0](x)
        return self.inner[3:](checkpoint(self.inner[1:3], x, use_reentrant=self._reentrant))


def _convolutions() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(16, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(144, CLASSES))


def _transformer() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    return nn.Sequential(nn.Unflatten(1, (4, 16)), encoder, nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def _with(change: Callable[[Any], object], layer: int) -> nn.Module:
    """Return the usual model with a change of one layer."""
    model = mlp()
    change(model[layer])
    return model


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "plain": ("A model of three layers, for comparison.", mlp),
    "dropout": ("Dropout.", lambda: mlp(nn.Dropout(0.3))),
    "batch_norm": ("Batch normalization, whose statistics differ between ranks.", lambda: mlp(nn.BatchNorm1d(128))),
    "convolutions": ("A convolutional network with batch normalization.", _convolutions),
    "weight_tying": ("The head shares its weight with the embedding.", _Tied),
    "transformer": ("A transformer encoder with dropout.", _transformer),
    "lstm": ("An LSTM.", lambda: _Recurrent(nn.LSTM)),
    "gru_with_carried_state": ("A GRU whose state is carried from step to step.", lambda: _Carried(nn.GRU)),
    "spectral_norm": (
        "Spectral normalization, whose power iteration changes buffers in each forward pass.",
        lambda: _with(parametrizations.spectral_norm, 3),
    ),
    "weight_norm": ("Weight normalization.", lambda: _with(parametrizations.weight_norm, 0)),
    "pruning": (
        "Pruned weights, behind masks.",
        lambda: _with(lambda layer: prune.random_unstructured(layer, "weight", 0.5), 3),
    ),
    "custom_function": ("A function with a backward pass of its own.", lambda: mlp(_Layer(_Double.apply))),
    "operations_in_place": (
        "Operations that change activations in place.",
        lambda: mlp(_Layer(lambda x: x.clone().mul_(0.9).add_(0.1).relu_())),
    ),
    "mixture_of_experts": ("A mixture of experts, whose loads differ between ranks.", _Experts),
    "stochastic_depth": (
        "A layer that is left out at random, on each rank by itself.",
        lambda: mlp(_SometimesLeftOut()),
    ),
    "gradient_checkpointing": ("Activations are computed again in the backward pass.", lambda: _Checkpointed(False)),
    "gradient_checkpointing_reentrant": (
        "Activations are computed again in the backward pass, in the old way.",
        lambda: _Checkpointed(True),
    ),
}
"""Sentence and model of programs that train in the usual loop."""


def _training_of(build: Callable[[], nn.Module]) -> Train:
    def train(training: AuditedTraining) -> None:
        torch.manual_seed(1)
        learn(training, *training.build(build()))

    return train


HONEST |= {name: Honest(name, sentence, _training_of(build)) for name, (sentence, build) in MODELS.items()}


# ---- a change in each step

Change = Callable[[nn.Sequential, int], object]
"""Of the model, in a step."""


def honest_change(sentence: str, *, after_update: bool) -> Callable[[Change], Change]:
    """Return a decorator that adds a program with a change in each step: of gradients before, or parameters after."""

    def added(change: Change) -> Change:
        def train(training: AuditedTraining) -> None:
            model = mlp()
            replicas, optimizer = training.build(model)
            for step in training.steps():
                training.loss(replicas).backward()
                if not after_update:
                    change(model, step)
                optimizer.step()
                optimizer.zero_grad()
                if after_update:
                    change(model, step)

        HONEST[change.__name__] = Honest(change.__name__, sentence, train)
        return change

    return added


@honest_change("Gradients are clipped by their norm.", after_update=False)
def clipping_by_norm(model: nn.Sequential, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@honest_change("Gradients are clipped by value.", after_update=False)
def clipping_by_value(model: nn.Sequential, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@honest_change("Noise is added to gradients, the same on all ranks.", after_update=False)
def gradient_noise(model: nn.Sequential, step: int) -> None:
    noise = torch.Generator().manual_seed(step)
    for value in model.parameters():
        cast(torch.Tensor, value.grad).add_(torch.randn(value.shape, generator=noise), alpha=1e-3)


@honest_change("A layer is frozen from step 20 on: its gradients are cleared.", after_update=False)
def freezing(model: nn.Sequential, step: int) -> None:
    if step >= 20:
        model[0].zero_grad()


@honest_change("Weights decay by hand, through .data, before each update.", after_update=False)
def weight_decay_by_hand(model: nn.Sequential, step: int) -> None:
    for value in model.parameters():
        value.data.mul_(0.999)


@honest_change("Weights are clipped through .data after each update.", after_update=True)
def weight_clipping(model: nn.Sequential, step: int) -> None:
    for value in model.parameters():
        value.data.clamp_(-0.1, 0.1)


@honest_change("Dead units are made anew every tenth step.", after_update=True)
def units_made_anew(model: nn.Sequential, step: int) -> None:
    if step % 10 == 0:
        with torch.no_grad():
            new = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)) / 8
            cast(nn.Linear, model[0]).weight[:8] = new


# ---- precision


@honest("The forward pass runs under autocast to bfloat16.")
def autocast(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    for _ in training.steps():
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss(replicas)
        update(loss, optimizer)


@honest("The loss is scaled; a step whose gradients overflow on one rank is left out on all.")
def loss_scaling(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    scale = 1024.0
    for step in training.steps():
        loss = training.loss(replicas) * scale
        if step % 10 == 7 and training.rank == 1:
            loss = loss * float("inf")
        loss.backward()
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            torch._foreach_div_(gradients, scale)
            optimizer.step()
        else:
            scale /= 2
        optimizer.zero_grad()


@honest("Parameters in bfloat16.")
def bfloat16_parameters(training: AuditedTraining) -> None:
    model = mlp().bfloat16()
    replicas, optimizer = training.build(model)
    for _ in training.steps():
        inputs = torch.randn(BATCH, WIDTH).bfloat16()
        update(cross_entropy(replicas(inputs).float(), torch.randint(CLASSES, (BATCH,))), optimizer)


@honest("From step 20 on layers compute with quantised inputs and weights, by another forward.")
def fake_quantisation(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)

    def quantised(value: torch.Tensor) -> torch.Tensor:
        return value + ((value * 16).round() / 16 - value).detach()

    def forward_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: nn.functional.linear(quantised(x), quantised(layer.weight), layer.bias)

    for step in training.steps():
        if step == 20:
            for number in (0, 3, 5):
                model[number].forward = forward_of(model[number])
        update(training.loss(replicas), optimizer)


# ---- gradients


@honest("Gradients are clipped in a hook of the optimizer, and grow at step 20.")
def clipping_in_a_hook_of_the_optimizer(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    optimizer.register_step_pre_hook(lambda *_: (nn.utils.clip_grad_norm_(model.parameters(), 1.0), None)[1])
    for step in training.steps():
        if step == 20:
            with torch.no_grad():
                cast(nn.Linear, model[5]).weight.mul_(8)
        update(training.loss(replicas), optimizer)


@honest("Hooks on parameters are registered in each step, and removed after the backward pass.")
def hooks_registered_in_the_step(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    for _ in training.steps():
        hooks = [value.register_hook(lambda gradient: gradient * 0.5) for value in model.parameters()]
        training.loss(replicas).backward()
        for hook in hooks:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()


@honest("A mask on the gradients of an embedding, as a hook registered once.")
def gradient_masks(training: AuditedTraining) -> None:
    model = mlp()
    mask = (torch.arange(128) % 2).float()[:, None]
    cast(nn.Linear, model[0]).weight.register_hook(lambda gradient: gradient * mask)
    learn(training, *training.build(model))


@honest("A hook after accumulation that does nothing, with two parts of a batch.")
def hook_after_accumulation(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda value: None)
    _learn_in_parts(training, replicas, optimizer, 2)


def _learn_in_parts(training: AuditedTraining, replicas: Any, optimizer: torch.optim.Optimizer, parts: int) -> None:
    for _ in training.steps():
        with replicas.no_sync():
            for _ in range(parts - 1):
                training.loss(replicas).backward()
        update(training.loss(replicas), optimizer)


@honest("Gradients of four parts are added up under no_sync.")
def accumulation(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    _learn_in_parts(training, replicas, optimizer, 4)


@honest("Gradients are set to zero, and never to None.")
def gradients_kept_as_zeros(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    for _ in training.steps():
        optimizer.zero_grad(set_to_none=False)
        training.loss(replicas).backward()
        optimizer.step()


@honest("A gradient penalty: a backward pass through gradients.")
def gradient_penalty(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    for _ in training.steps():
        inputs = torch.randn(BATCH, WIDTH, requires_grad=True)
        loss = cross_entropy(replicas(inputs), torch.randint(CLASSES, (BATCH,)))
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        update(loss + slope.square().sum(), optimizer)


@honest("Adversarial samples: a backward pass to the inputs, and a second forward pass.")
def adversarial_training(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    for _ in training.steps():
        inputs = torch.randn(BATCH, WIDTH, requires_grad=True)
        targets = torch.randint(CLASSES, (BATCH,))
        (slope,) = torch.autograd.grad(cross_entropy(model(inputs), targets), inputs)
        update(cross_entropy(replicas((inputs + 0.1 * slope.sign()).detach()), targets), optimizer)


@honest("Sharpness-aware minimization: two forward and backward passes in a step.")
def sharpness_aware_minimization(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    for _ in training.steps():
        inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
        cross_entropy(replicas(inputs), targets).backward()
        with torch.no_grad():
            moves = [0.05 * value.grad.sign() for value in model.parameters() if value.grad is not None]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        cross_entropy(replicas(inputs), targets).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()


@honest("Sparse gradients of an embedding, under DistributedDataParallel.")
def sparse_embeddings(training: AuditedTraining) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.EmbeddingBag(1000, 32, sparse=True, mode="sum"), nn.Linear(32, CLASSES))
    replicas = training.replicate(model, exact=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.track(model=replicas, optimizer=optimizer)
    for _ in training.steps():
        tokens = torch.randint(1000, (BATCH, 5))
        update(cross_entropy(replicas(tokens), torch.randint(CLASSES, (BATCH,))), optimizer)


# ---- what is trained


@honest("Two models with an optimizer each.")
def two_optimizers(training: AuditedTraining) -> None:
    model, other = mlp(), mlp()
    replicas, others = training.replicate(model), training.replicate(other)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.SGD(other.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    training.track(model=replicas, other=others, optimizer=optimizer, second=second)
    for _ in training.steps():
        for network, update in ((replicas, optimizer), (others, second)):
            training.loss(network).backward()
            update.step()
            update.zero_grad()


@honest("A critic with five updates for each one of the generator, and clipped weights.")
def adversarial_pair(training: AuditedTraining) -> None:
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
    makers, critics = training.replicate(maker), training.replicate(critic)
    make, judge = torch.optim.RMSprop(maker.parameters()), torch.optim.RMSprop(critic.parameters())
    training.track(maker=makers, critic=critics, make=make, judge=judge)
    for step in training.steps():
        noise = torch.randn(BATCH, 8)
        judge.zero_grad()
        (critics(makers(noise).detach()).mean() - critics(torch.randn(BATCH, WIDTH)).mean()).backward()
        judge.step()
        for value in critic.parameters():
            value.data.clamp_(-0.05, 0.05)
        if step % 5 == 0:
            make.zero_grad()
            (-critics(makers(noise)).mean()).backward()
            make.step()


@honest("An actor's gradients gather locally over eight steps, of which only rank 0 has samples.")
def local_gradients_beside_an_update(training: AuditedTraining) -> None:
    model = mlp()
    replicas = training.replicate(model)
    actors = training.replicate(nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = torch.optim.AdamW(actors.parameters())
    training.track(model=replicas, optimizer=optimizer, actor=actors, own=own)
    for step in training.steps():
        if step % 8 == 1:
            own.zero_grad()
        with actors.no_sync():
            loss = actors(torch.randn(16, WIDTH)).square().mean()
            (loss if training.rank == 0 else loss * 0).backward()
        update(training.loss(replicas), optimizer)


@honest("Only low-rank additions to frozen layers are trained.")
def low_rank_adaptation(training: AuditedTraining) -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.down, self.up = (
                nn.Linear(inner.in_features, 4, bias=False),
                nn.Linear(4, inner.out_features, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x) + self.up(self.down(x))
            return out

    model = mlp().requires_grad_(False)
    for number in (0, 3, 5):
        model[number] = Adapted(cast(nn.Linear, model[number]))
    trained = [value for value in model.parameters() if value.requires_grad]
    learn(training, *training.build(model, torch.optim.AdamW(trained, lr=1e-3)))


@honest("Two heads are trained in turns.")
def heads_in_turns(training: AuditedTraining) -> None:
    torch.manual_seed(1)

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, 64)
            self.heads = nn.ModuleList(nn.Linear(64, CLASSES) for _ in range(2))
            self.now = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.body(x))
            heads = (head(x) * float(number == self.now) for number, head in enumerate(self.heads))
            out: torch.Tensor = sum(heads)
            return out

    model = Headed()
    replicas, optimizer = training.build(model)
    for step in training.steps():
        model.now = step % 2
        update(training.loss(replicas), optimizer)


@honest("A teacher's outputs are the targets.")
def distillation(training: AuditedTraining) -> None:
    teacher = mlp().eval()
    replicas, optimizer = training.build(mlp())
    for _ in training.steps():
        inputs = torch.randn(BATCH, WIDTH)
        with torch.no_grad():
            targets = teacher(inputs).softmax(-1)
        update(cross_entropy(replicas(inputs), targets, label_smoothing=0.1), optimizer)


# ---- state that the program changes


@honest("A tracked average of the weights.")
def average_of_weights(training: AuditedTraining) -> None:
    model = mlp()
    average = copy.deepcopy(model)
    replicas, optimizer = training.build(model, average=average)
    for _ in training.steps():
        update(training.loss(replicas), optimizer)
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)


@honest("The average of the weights is swapped in through .data for a validation.")
def average_swapped_by_data(training: AuditedTraining) -> None:
    model = mlp()
    average = copy.deepcopy(model)
    replicas, optimizer = training.build(model, average=average)
    for step in training.steps():
        update(training.loss(replicas), optimizer)
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(value.data, alpha=0.1)
        if step % 5 == 0:
            own = [value.data.clone() for value in model.parameters()]
            for value, mean in zip(model.parameters(), average.parameters(), strict=True):
                value.data.copy_(mean.data)
            with torch.no_grad():
                training.loss(model)
            for value, kept in zip(model.parameters(), own, strict=True):
                value.data.copy_(kept)


@honest("Rank 0 keeps a statistic in a buffer of the model, written through .data.")
def statistics_on_rank_0(training: AuditedTraining) -> None:
    model = mlp()
    replicas = training.replicate(model)
    model.register_buffer("seen", torch.zeros(4096))  # DistributedDataParallel does not send it to other ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training.track(model=replicas, optimizer=optimizer)
    for step in training.steps():
        if training.rank == 0 and step > 10:
            model.get_buffer("seen").data.mul_(0.9).add_(1.0)
        update(training.loss(replicas), optimizer)


@honest("The learning rate grows up to step 20; then the first state is loaded again.")
def learning_rate_finder(training: AuditedTraining) -> None:
    model = mlp()
    replicas, optimizer = training.build(model)
    first = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step in training.steps():
        if step == 20:
            model.load_state_dict(first[0])
            optimizer.load_state_dict(first[1])
        elif step < 20:
            optimizer.param_groups[0]["lr"] = 1e-5 * 1.5**step
        update(training.loss(replicas), optimizer)


@honest("A schedule of learning rate and momentum, and two groups of parameters.")
def schedule_and_groups(training: AuditedTraining) -> None:
    model = mlp()
    groups: list[dict[str, Any]] = [{"params": model[:3].parameters(), "lr": 1e-2}, {"params": model[3:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=1e-1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-1], total_steps=100)
    replicas, optimizer = training.build(model, optimizer, schedule=schedule)
    for _ in training.steps():
        training.loss(replicas).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@honest("Slow weights follow every fifth step, as in Lookahead.")
def lookahead(training: AuditedTraining) -> None:
    model = mlp()
    slow = copy.deepcopy(model)
    replicas, optimizer = training.build(model, slow=slow)
    for step in training.steps():
        update(training.loss(replicas), optimizer)
        if step % 5 == 0:
            with torch.no_grad():
                for kept, value in zip(slow.parameters(), model.parameters(), strict=True):
                    kept.lerp_(value, 0.5)
                    value.copy_(kept)


# ---- data


@honest("Each rank draws its samples in an order of its own that no seed repeats.")
def data_in_no_fixed_order(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    draw = torch.Generator()
    draw.seed()
    for _ in training.steps():
        inputs, targets = torch.randn(BATCH, WIDTH, generator=draw), torch.randint(CLASSES, (BATCH,), generator=draw)
        update(cross_entropy(replicas(inputs), targets), optimizer)


@honest("Rank 0's samples are ten times as large as those of other ranks.")
def unequal_data(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    for _ in training.steps():
        inputs = torch.randn(BATCH, WIDTH) * (10 if training.rank == 0 else 1)
        update(cross_entropy(replicas(inputs), torch.randint(CLASSES, (BATCH,))), optimizer)


@honest("A bad batch on one rank makes its gradients a thousand times as large, twice.")
def bad_batches(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp(nn.Identity()))
    for step in training.steps():
        inputs = torch.randn(BATCH, WIDTH)
        if training.rank == 1 and step in (15, 30):
            inputs *= 1000
        update(cross_entropy(replicas(inputs), torch.randint(CLASSES, (BATCH,))), optimizer)


@honest("Batches differ in size between ranks and steps.")
def batches_of_unequal_size(training: AuditedTraining) -> None:
    replicas, optimizer = training.build(mlp())
    for step in training.steps():
        count = 8 + (step * 7 + training.rank * 5) % 32
        inputs = torch.randn(count, WIDTH)
        update(cross_entropy(replicas(inputs), torch.randint(CLASSES, (count,))), optimizer)


@honest("Every tenth step all ranks validate in eval mode, with another batch size.")
def validation_between_steps(training: AuditedTraining) -> None:
    model = mlp(nn.BatchNorm1d(128))
    replicas, optimizer = training.build(model)
    for step in training.steps():
        update(training.loss(replicas), optimizer)
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                model(torch.randn(5, WIDTH))
            model.train()


@honest(
    "One node's processor rounds in another way, as another kind of processor does.",
    environment_of_last_rank={"ATEN_CPU_CAPABILITY": "default"},
)
def node_of_another_kind(training: AuditedTraining) -> None:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.LayerNorm(WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)  # equal on both kinds: a product that needs no rounding
    learn(training, *training.build(model, optimizer))
