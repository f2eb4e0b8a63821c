"""Checks of the products of linear layers by checksums."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from everstep.wire.v1.local import WrongProduct
from everstep_trainer.sdc import checksums, matmul
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.checksums import Patch, compare_elements, screen
from everstep_trainer.sdc.matmul import Matmul, capture_wrong_product
from tests.support.ranks.kept_ranks import KeptRanks
from tests.unit.trainer_hooks.sdc.audited_blocks import Block, audit_of, fresh, train

PRODUCTS = ["forward", "input gradient", "weight gradient"]
DTYPES = [None, torch.bfloat16]


class _Spoiled(torch.autograd.Function):
    """The identity, with one wrong element in its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return spoil(gradients[0].clone())


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Make the largest element three times as large."""
    flat = tensor.detach().view(-1)
    flat[flat.abs().argmax()] *= 3
    return tensor


def spoiled_in_backward(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Spoiled.apply(tensor)
    return result


def linear_of(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


@contextmanager
def faulty(layer: nn.Linear, product: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make one element of one product of a layer wrong in each call."""
    original: Callable[..., torch.Tensor] = functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight is not layer.weight:
            return original(x, weight, bias)
        if product == "forward":
            return spoil(original(x, weight, bias))
        if product == "input gradient":
            return original(spoiled_in_backward(x), weight, bias)
        return original(x, spoiled_in_backward(weight), bias)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", linear)
        yield


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clean_training_is_left_alone(checkpointed: bool, dtype: torch.dtype | None, micro_batches: int) -> None:
    model = fresh(checkpointed)
    audit, mismatches = audit_of(Matmul, model)
    trained = train(model, audit, 8, micro_batches, dtype)
    assert not mismatches
    assert torch.equal(trained, train(fresh(checkpointed), None, 8, micro_batches, dtype))
    layers = ["model.0.up", "model.0.down", "model.1.up", "model.1.down"]
    products = {f"{layer} {product}" for layer in layers for product in PRODUCTS}
    assert audit._agreed == products - {"model.0.up input gradient"}  # data needs no gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_a_wrong_product_are_kept(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(checkpointed=False)
    kept: list[WrongProduct] = []
    audit, mismatches = audit_of(Matmul, model, kept.append)
    train(model, audit, 4, 1, dtype)
    assert not kept
    with faulty(linear_of(model, "1.down"), "forward", monkeypatch):
        train(model, audit, 1, 1, dtype)
    (product,) = kept
    left, right = (
        torch.frombuffer(bytearray(side), dtype=dtype or torch.float32) for side in (product.left, product.right)
    )
    known = left.view(product.rows, product.inner).double() @ right.view(product.inner, product.columns).double()
    assert product.work == "model.1.down forward of step 1"
    assert (product.inner, product.columns) == (65, 1), "64 inputs and the bias"
    expected = float(mismatches[0].difference.rpartition("expected ")[2])
    assert (known - expected).abs().min() < 1e-4


def test_operands_that_are_too_large_lose_rows_or_are_not_kept() -> None:
    whole = Patch(torch.ones(4, 1), torch.ones(4, 60_000), torch.ones(60_000, 1))
    captured = capture_wrong_product("up", whole)
    assert captured is not None
    assert captured.rows == 2
    assert capture_wrong_product("up", Patch(torch.ones(4, 1), torch.ones(4, 200_000), torch.ones(200_000, 1))) is None


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("layer", ["1.up", "1.down"])
def test_one_wrong_element_is_found(
    product: str, dtype: torch.dtype | None, checkpointed: bool, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh(checkpointed)
    audit, mismatches = audit_of(Matmul, model)
    train(model, audit, 4, 2, dtype)
    with faulty(linear_of(model, layer), product, monkeypatch):
        train(model, audit, 1, 2, dtype)
    assert {each.unit for each in mismatches} == {f"model.{layer} {product}"}
    assert mismatches[0].difference.startswith("1 of ")
    assert mismatches[0].original != mismatches[0].digest


def test_wrong_element_in_recomputation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Block())
    audit, mismatches = audit_of(Matmul, model)
    train(model, audit, 4)
    original = functional.linear

    def linear(*args: Any) -> torch.Tensor:
        result = original(*args)
        is_wrong = args[1] is model.get_parameter("1.up.weight") and torch._C._current_graph_task_id() != -1
        return spoil(result) if is_wrong else result

    monkeypatch.setattr(functional, "linear", linear)
    train(model, audit, 1)
    assert {each.unit for each in mismatches} == {"model.1.up forward"}


def test_product_that_never_agreed_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(checkpointed=False)
    audit, mismatches = audit_of(Matmul, model)
    with faulty(linear_of(model, "1.down"), "weight gradient", monkeypatch):
        train(model, audit, 4)
    assert not mismatches


class _Awkward(nn.Module):
    """Values of all magnitudes, a shared weight, a layer that is called twice, and dead units."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 24)
        self.first, self.twice, self.small = nn.Linear(24, 300), nn.Linear(300, 300), nn.Linear(300, 24)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.tokens.weight
        with torch.no_grad():
            self.first.weight[::100] *= 1000  # outlying features
            self.first.bias[50:150] = -1e4  # units that never fire
            self.small.weight *= 1e-12

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(self.tokens(tokens)))
        x = checkpoint(lambda y: functional.relu(self.twice(self.twice(y))), x, use_reentrant=False)
        result: torch.Tensor = self.head(self.small(x) * 1e9)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_model_is_left_alone(dtype: torch.dtype | None) -> None:
    def trained(audited: bool) -> tuple[torch.Tensor, list[Any]]:
        torch.manual_seed(0)
        model = _Awkward()
        audit, mismatches = audit_of(Matmul, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(1, 13):
            if audited:
                audit.begin_step(step, due=True)
            for length in (40, 7, 300):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                    tokens = torch.randint(32, (2, length))
                    output = model(tokens).float()
                loss = functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
                (loss + 0.1 * model.twice.weight.square().sum() * (step % 3 == 0)).backward()
            if audited:
                audit.before_update(step, due=True)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), mismatches

    parameters, mismatches = trained(audited=True)
    assert not mismatches
    assert torch.equal(parameters, trained(audited=False)[0])


def test_penalty_in_the_loss_is_no_wrong_product() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    audit, mismatches = audit_of(Matmul, model)
    for step in range(1, 7):
        audit.begin_step(step, due=True)
        penalty = model.weight.square().sum() * (step % 2)  # in some steps only
        (model(torch.randn(8, 16)).square().mean() + penalty).backward()
        audit.before_update(step, due=True)
    assert not mismatches
    assert "model weight gradient" in audit._agreed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return weak references to all calls of layers."""
    made: list[weakref.ref[Any]] = []
    original = matmul._LayerCall

    def call(linear: Any) -> Any:
        layer_call = original(linear)
        made.append(weakref.ref(layer_call))
        return layer_call

    monkeypatch.setattr(matmul, "_LayerCall", call)
    return made


def test_call_is_forgotten_with_its_graph(calls: list[weakref.ref[Any]]) -> None:
    model = fresh(checkpointed=False)
    audit, _ = audit_of(Matmul, model)
    audit.begin_step(1, due=True)
    loss = model(torch.randn(4, 8, 16)).square().mean()
    assert all(call() is not None for call in calls)
    del loss
    assert all(call() is None for call in calls), "without a collection of cycles"


def test_clean_products_are_seldom_suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[bool] = []
    original = screen

    def counted(*args: Any) -> Any:
        screening = original(*args)
        flags.append(bool(screening.is_suspicious))
        return screening

    monkeypatch.setattr(matmul, "screen", counted)
    monkeypatch.setattr(matmul, "SMALL", 2.0)  # screen all, always
    model = fresh()
    audit, _ = audit_of(Matmul, model)
    train(model, audit, 30, dtype=torch.bfloat16)
    train(model, audit, 30)
    assert len(flags) > 700
    assert sum(flags) <= len(flags) / 100, "a suspicion costs a comparison"


def added_in_sequence(kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return terms of four elements, and their sums as a kernel for AVX-512 adds them: one after another."""
    torch.manual_seed(0)
    terms = {"equal": torch.full((4, count), 0.1), "of one sign": torch.rand(4, count)}.get(kind, torch.randn(4, count))
    return terms, torch.from_numpy(np.cumsum(terms.numpy(), axis=1)[:, -1:].copy())


@pytest.mark.parametrize("count", [80, 600, 5000])
@pytest.mark.parametrize("kind", ["equal", "of one sign", "of both signs"])
def test_sum_of_terms_in_sequence_agrees(kind: str, count: int) -> None:
    """Equal terms are all rounded in the same direction."""
    terms, rows = added_in_sequence(kind, count)
    assert compare_elements(rows, terms, torch.ones(count, 1)) is None


@pytest.mark.parametrize("kind", ["of one sign", "of both signs"])
def test_small_error_in_such_a_sum_is_found(kind: str) -> None:
    terms, rows = added_in_sequence(kind, 600)
    rows[2] *= 1 + 2**-12
    difference = compare_elements(rows, terms, torch.ones(600, 1))
    assert difference is not None
    assert difference.startswith("1 of 4 elements differ")


def test_weight_cast_once_for_several_uses_is_not_reported() -> None:
    model = nn.Linear(16, 16)
    audit, mismatches = audit_of(Matmul, model)
    for step in range(1, 9):
        audit.begin_step(step, due=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 16)).float().square().mean()
            if step % 4 == 0:
                loss = loss + 50 * (model.weight @ model.weight.t()).float().square().mean()
        loss.backward()
        audit.before_update(step, due=True)
    assert not mismatches
    assert "model weight gradient" in audit._agreed


@pytest.mark.parametrize("saved", ["products", "everything"])
def test_selective_checkpointing_keeps_its_own_results(saved: str) -> None:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        is_saved = saved == "everything" or op in products
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(audited: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
        audit, mismatches = audit_of(Matmul, model)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for step in range(1, 6):
            audit.begin_step(step, due=audited)
            x = torch.randn(8, 16, requires_grad=True) * 1
            output = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            if step == 4:  # is recomputed without hooks
                audit.before_update(step, due=audited)
            output.square().mean().backward()
            audit.before_update(step, due=audited)
        assert not mismatches
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    assert torch.equal(gradients(audited=True), gradients(audited=False))


def test_nested_tensors_are_left_alone() -> None:
    model = nn.Linear(16, 4)
    audit, _ = audit_of(Matmul, model)
    audit.begin_step(1, due=True)
    ragged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    assert model(ragged).is_nested


def rounded_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear((x * 16).round() / 16, layer.weight, layer.bias)


def test_forward_that_the_program_replaces_is_left_alone() -> None:
    model = fresh(False)
    audit, mismatches = audit_of(Matmul, model)
    train(model, audit, 3)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(rounded_linear, layer)  # type: ignore[method-assign]
    train(model, audit, 3)
    assert not mismatches


def wrong_from_the_first_step(rank: int, world: int, wrong_ranks: tuple[int, ...]) -> list[str]:
    model = fresh(False)
    mismatches: list[Mismatch] = []
    setup = AuditSetup(
        rank=rank,
        world_size=world,
        nodes=tuple(f"node-{number}" for number in range(world)),
        device=torch.device("cpu"),
        objects={"model": model},
        has_replica_per_rank=True,
        report=mismatches.append,
    )
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    with (
        pytest.MonkeyPatch.context() as patch,
        faulty(layer, "forward", patch) if rank in wrong_ranks else nullcontext(),
    ):
        train(model, Matmul(setup), 4)
    return [mismatch.unit for mismatch in mismatches]


def test_rank_wrong_from_its_first_step_is_reported(kept_ranks: KeptRanks) -> None:
    first, second, third = kept_ranks.call(3, wrong_from_the_first_step, (1,))
    assert not first
    assert second
    assert all("forward" in unit for unit in second)
    assert not third


def test_half_precision_is_added_in_float32() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(600, 128).bfloat16(), torch.randn(128, 64).bfloat16()
    product = (left.float() @ right.float()).bfloat16()
    wide = checksums._wide_sums(product, torch.float32)
    torch.testing.assert_close(wide, checksums._sums(product.float(), torch.float32), rtol=1e-4, atol=1e-2)
    assert wide.dtype is torch.float32
    assert len(wide) == 3


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_newer_switch_of_tf32_is_read(precision: str) -> None:
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert checksums.multiplies_in_tf32() is (precision == "tf32")
    finally:
        matmul.fp32_precision = before
