"""Checks of the products of linear layers by checksums."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from everstep_trainer.sdc import checksums, matmul
from everstep_trainer.sdc.audit import AuditSetup, Mismatch
from everstep_trainer.sdc.checksums import Patch
from everstep_trainer.sdc.matmul import Matmul, capture_wrong_product
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.audited_blocks import Block, audit_of, fresh, train

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


@contextmanager
def faulty(layer: nn.Linear, product: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have one element of one product of a layer be wrong in each call."""
    original: Callable[..., torch.Tensor] = functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight is not layer.weight:
            return original(x, weight, bias)
        if product == "forward":
            return spoil(original(x, weight, bias))
        if product == "input gradient":
            return original(_Spoiled.apply(x), weight, bias)
        return original(x, _Spoiled.apply(weight), bias)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", linear)
        yield


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_clean_training_is_left_alone(checkpointed, dtype, micro_batches):
    model = fresh(checkpointed)
    audit, said = audit_of(Matmul, model)
    trained = train(model, audit, 8, micro_batches, dtype)
    assert not said
    assert torch.equal(trained, train(fresh(checkpointed), None, 8, micro_batches, dtype))
    layers = ["model.0.up", "model.0.down", "model.1.up", "model.1.down"]
    products = {f"{layer} {product}" for layer in layers for product in PRODUCTS}
    assert audit._agreed == products - {"model.0.up input gradient"}  # data needs no gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_a_wrong_product_are_kept(dtype, monkeypatch):
    model, kept = fresh(checkpointed=False), []
    audit, said = audit_of(Matmul, model, kept.append)
    train(model, audit, 4, 1, dtype)
    assert not kept
    with faulty(model.get_submodule("1.down"), "forward", monkeypatch):
        train(model, audit, 1, 1, dtype)
    (product,) = kept
    left, right = (
        torch.frombuffer(bytearray(one), dtype=dtype or torch.float32) for one in (product.left, product.right)
    )
    known = left.view(product.rows, product.inner).double() @ right.view(product.inner, product.columns).double()
    assert product.work == "model.1.down forward of step 1"
    assert (product.inner, product.columns) == (65, 1), "64 inputs and the bias"
    expected = float(said[0].difference.rpartition("expected ")[2])
    assert (known - expected).abs().min() < 1e-4


def test_operands_that_are_too_large_lose_rows_or_are_not_kept():
    whole = Patch(torch.ones(4, 1), torch.ones(4, 60_000), torch.ones(60_000, 1))
    assert capture_wrong_product("up", whole).rows == 2
    assert capture_wrong_product("up", Patch(torch.ones(4, 1), torch.ones(4, 200_000), torch.ones(200_000, 1))) is None


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("layer", ["1.up", "1.down"])
def test_one_wrong_element_is_found(product, dtype, checkpointed, layer, monkeypatch):
    model = fresh(checkpointed)
    audit, said = audit_of(Matmul, model)
    train(model, audit, 4, 2, dtype)
    with faulty(model.get_submodule(layer), product, monkeypatch):
        train(model, audit, 1, 2, dtype)
    assert {each.unit for each in said} == {f"model.{layer} {product}"}
    assert said[0].difference.startswith("1 of ")
    assert said[0].original != said[0].digest


def test_wrong_element_in_recomputation_is_found(monkeypatch):
    model = nn.Sequential(nn.Linear(16, 16), Block())
    audit, said = audit_of(Matmul, model)
    train(model, audit, 4)
    original = functional.linear

    def linear(*args: Any) -> torch.Tensor:
        result = original(*args)
        is_wrong = args[1] is model[1].up.weight and torch._C._current_graph_task_id() != -1
        return spoil(result) if is_wrong else result

    monkeypatch.setattr(functional, "linear", linear)
    train(model, audit, 1)
    assert {each.unit for each in said} == {"model.1.up forward"}


def test_product_that_never_agreed_accuses_nobody(monkeypatch):
    model = fresh(checkpointed=False)
    audit, said = audit_of(Matmul, model)
    with faulty(model[1].down, "weight gradient", monkeypatch):
        train(model, audit, 4)
    assert not said


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
        return self.head(self.small(x) * 1e9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_model_is_left_alone(dtype):
    def trained(audited: bool) -> tuple[torch.Tensor, list[Any]]:
        torch.manual_seed(0)
        model = _Awkward()
        audit, said = audit_of(Matmul, model)
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
        return torch.cat([p.detach().flatten() for p in model.parameters()]), said

    parameters, said = trained(audited=True)
    assert not said
    assert torch.equal(parameters, trained(audited=False)[0])


def test_penalty_in_the_loss_is_no_wrong_product():
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    audit, said = audit_of(Matmul, model)
    for step in range(1, 7):
        audit.begin_step(step, due=True)
        penalty = model.weight.square().sum() * (step % 2)  # in some steps only
        (model(torch.randn(8, 16)).square().mean() + penalty).backward()
        audit.before_update(step, due=True)
    assert not said
    assert "model weight gradient" in audit._agreed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Return weak references to all calls of layers."""
    made: list[weakref.ref[Any]] = []
    original = matmul._Call

    def call(linear: Any) -> Any:
        one = original(linear)
        made.append(weakref.ref(one))
        return one

    monkeypatch.setattr(matmul, "_Call", call)
    return made


def test_call_is_forgotten_with_its_graph(calls):
    model = fresh(checkpointed=False)
    audit, _ = audit_of(Matmul, model)
    audit.begin_step(1, due=True)
    loss = model(torch.randn(4, 8, 16)).square().mean()
    assert all(one() is not None for one in calls)
    del loss
    assert all(one() is None for one in calls), "without a collection of cycles"


def test_nothing_is_kept_after_the_step(calls):
    model = fresh(checkpointed=False)
    audit, _ = audit_of(Matmul, model)
    train(model, audit, 2)
    audit.begin_step(3, due=True)
    calls.clear()
    loss = model(torch.randn(4, 8, 16)).square().mean()
    loss.backward()
    found = [one() for one in calls]
    assert len(found) == 4
    assert all(one is not None and one.input is None and one._output_gradient is None for one in found)
    audit.before_update(3, due=True)
    assert not any(linear._hooks or linear._recomputed for linear in audit._linears)
    assert not model[0].up._forward_hooks


def test_backward_pass_after_the_update_still_works():
    model = fresh()
    audit, said = audit_of(Matmul, model)
    train(model, audit, 2)
    audit.begin_step(3, due=True)
    first, second = (model(torch.randn(4, 8, 16)).square().mean() for _ in range(2))
    first.backward()
    audit.before_update(3, due=True)
    second.backward()  # recomputes without hooks
    audit.begin_step(4, due=True)
    third = model(torch.randn(4, 8, 16)).square().mean()
    third.backward(retain_graph=True)
    third.backward()
    audit.before_update(4, due=True)
    assert not said


def test_clean_products_are_seldom_suspicious(monkeypatch):
    flags: list[bool] = []
    original = matmul.screen

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
    assert sum(flags) == 0


def test_loss_that_needs_a_gradient_in_some_steps_accuses_nobody():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    audit, said = audit_of(Matmul, model)
    for step in range(1, 9):
        audit.begin_step(step, due=True)
        loss = model(torch.randn(8, 16)).square().mean()
        if step % 4 == 0:  # a penalty on the input's gradient
            x = torch.randn(8, 16, requires_grad=True)
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = loss + gradient.square().sum()
        loss.backward()
        audit.before_update(step, due=True)
    assert not said


def test_second_pass_with_another_loss_accuses_nobody():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    audit, said = audit_of(Matmul, model)
    for step in range(1, 9):
        audit.begin_step(step, due=True)
        x = torch.randn(8, 16, requires_grad=True)
        output = model(x)
        if step % 3 == 0:
            torch.autograd.grad(output.sum(), x, retain_graph=True)
        if step % 4 == 0:
            torch.autograd.grad(output.sum(), model[0].weight, retain_graph=True)
        output.square().mean().backward()
        audit.before_update(step, due=True)
    assert not said


def test_weight_cast_once_for_several_uses_accuses_nobody():
    model = nn.Linear(16, 16)
    audit, said = audit_of(Matmul, model)
    for step in range(1, 9):
        audit.begin_step(step, due=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 16)).float().square().mean()
            if step % 4 == 0:
                loss = loss + 50 * (model.weight @ model.weight.t()).float().square().mean()
        loss.backward()
        audit.before_update(step, due=True)
    assert not said
    assert "model weight gradient" in audit._agreed


def test_leaf_cast_once_for_several_layers_keeps_its_gradient():
    def gradient(audited: bool) -> Any:
        torch.manual_seed(1)
        layers, queries = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Parameter(torch.randn(8, 16))
        audit, _ = audit_of(Matmul, layers)
        audit.begin_step(1, due=audited)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.stack([layer(queries).float().square().mean() for layer in layers]).sum()
        loss.backward()
        audit.before_update(1, due=audited)
        return queries.grad

    assert torch.equal(gradient(audited=True), gradient(audited=False))


@pytest.mark.parametrize("saved", ["products", "everything"])
def test_selective_checkpointing_keeps_its_own_results(saved):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        is_saved = saved == "everything" or op in products
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(audited: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
        audit, said = audit_of(Matmul, model)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for step in range(1, 6):
            audit.begin_step(step, due=audited)
            x = torch.randn(8, 16, requires_grad=True) * 1
            output = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            if step == 4:  # is recomputed without hooks
                audit.before_update(step, due=audited)
            output.square().mean().backward()
            audit.before_update(step, due=audited)
        assert not said
        return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    assert torch.equal(gradients(audited=True), gradients(audited=False))


def test_nested_tensors_are_left_alone():
    model = nn.Linear(16, 4)
    audit, _ = audit_of(Matmul, model)
    audit.begin_step(1, due=True)
    ragged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    assert model(ragged).is_nested


def test_class_forward_that_a_library_replaces_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    model = fresh(False)
    audit, said = audit_of(Matmul, model)
    train(model, audit, 3)
    quantised = lambda layer, x: functional.linear((x * 16).round() / 16, layer.weight, layer.bias)  # noqa: E731
    monkeypatch.setattr(nn.Linear, "forward", quantised)
    train(model, audit, 3)
    assert not said


def test_forward_that_the_program_replaces_is_left_alone():
    model = fresh(False)
    audit, said = audit_of(Matmul, model)
    train(model, audit, 3)
    for layer in (one for one in model.modules() if isinstance(one, nn.Linear)):
        layer.forward = lambda x, layer=layer: functional.linear((x * 16).round() / 16, layer.weight, layer.bias)
    train(model, audit, 3)
    assert not said


def wrong_from_the_first_step(rank: int, world: int, wrong_ranks: tuple[int, ...]) -> list[str]:
    model = fresh(False)
    said: list[Mismatch] = []
    setup = AuditSetup(
        rank=rank,
        world_size=world,
        nodes=tuple(f"node-{number}" for number in range(world)),
        device=torch.device("cpu"),
        objects={"model": model},
        has_replica_per_rank=True,
        report=said.append,
    )
    layer = next(one for one in model.modules() if isinstance(one, nn.Linear))
    with (
        pytest.MonkeyPatch.context() as patch,
        faulty(layer, "forward", patch) if rank in wrong_ranks else nullcontext(),
    ):
        train(model, Matmul(setup), 4)
    return [one.unit for one in said]


def test_rank_wrong_from_its_first_step_is_reported(kept_ranks):
    first, second, third = kept_ranks.call(3, wrong_from_the_first_step, (1,))
    assert not first
    assert second
    assert all("forward" in unit for unit in second)
    assert not third


def test_layer_that_differs_on_all_ranks_is_no_fault(kept_ranks):
    assert not any(kept_ranks.call(3, wrong_from_the_first_step, (0, 1, 2)))


def test_half_precision_is_added_in_float32():
    torch.manual_seed(0)
    left, right = torch.randn(600, 128).bfloat16(), torch.randn(128, 64).bfloat16()
    product = (left.float() @ right.float()).bfloat16()
    wide = checksums._wide_sums(product, torch.float32)
    torch.testing.assert_close(wide, checksums._sums(product.float(), torch.float32), rtol=1e-4, atol=1e-2)
    assert wide.dtype is torch.float32
    assert len(wide) == 3


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_newer_switch_of_tf32_is_read(precision):
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert checksums.multiplies_in_tf32() is (precision == "tf32")
    finally:
        matmul.fp32_precision = before
