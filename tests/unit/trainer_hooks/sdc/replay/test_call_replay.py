"""A captured call of a unit gives the same bits when it is replayed, and changes no state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everstep_trainer.sdc.replay.call_replay import is_replaying, replay
from everstep_trainer.sdc.replay.capture import Capture, PassRecord
from everstep_trainer.sdc.replay.memory import MemoryLevels, describe_shortage, read_memory_levels
from everstep_trainer.sdc.replay.units import Unit
from tests.unit.trainer_hooks.sdc.audited_models import CPU, MODELS, Model, captured_step, one_step, units_of


def numbers(record: PassRecord) -> dict[str, list[int | None]]:
    found: dict[str, list[int | None]] = {}
    for item, digest in zip(record.items, record.digests, strict=True):
        found.setdefault(item.name, []).append(None if digest is None else int(digest.item()))
    return found


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    held = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    grads = {f"{name}.grad": p.grad.clone().to_dense() for name, p in module.named_parameters() if p.grad is not None}
    return {**held, **grads, "rng": torch.get_rng_state()}


def assert_equal_states(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


def check_replay(module: nn.Module, model: Model, unit: Unit, call: int, *, autocast: bool = False) -> PassRecord:
    capture = captured_step(module, model, unit, call, autocast=autocast)
    assert not capture.problem
    assert capture.captured is not None
    before = state(module)
    again = replay(unit, capture.captured, CPU)
    assert_equal_states(before, state(module))
    assert numbers(again) == numbers(capture.captured.record)
    return again


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_replay_equals_the_original(name: str, autocast: bool) -> None:
    torch.manual_seed(1)
    module = MODELS[name].build()
    for unit in units_of(module):
        for call in range(2):
            record = check_replay(module, MODELS[name], unit, call, autocast=autocast)
            if name != "reentrant" or not unit.name.startswith("blocks"):
                expected = {f"gradient of {key}" for key, _ in unit.module.named_parameters()}
                found = {
                    item.name for item, digest in zip(record.items, record.digests, strict=True) if digest is not None
                }
                assert expected <= found


@pytest.mark.parametrize("name", MODELS)
def test_capture_does_not_change_training(name: str) -> None:
    results = []
    for captures in (False, True):
        torch.manual_seed(1)
        module = MODELS[name].build()
        for unit in units_of(module):
            if captures:
                capture = captured_step(module, MODELS[name], unit, 1)
                assert capture.captured is not None
                replay(unit, capture.captured, CPU)
            else:
                one_step(module, MODELS[name])
        results.append(state(module))
    assert_equal_states(*results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch.compile has its own
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_unit_is_replayed_compiled(in_place: bool, whole: bool) -> None:
    torch.manual_seed(1)
    module = MODELS["gpt"].build()
    if whole:
        if in_place:
            module.compile(backend="aot_eager")
        else:
            module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    else:
        for number, block in enumerate(module.blocks):  # type: ignore[arg-type]
            if in_place:
                block.compile(backend="aot_eager")
            else:
                module.blocks[number] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment, operator]
    units = units_of(module)
    assert [unit.name for unit in units] == (
        ["model"] if whole else ["words", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    )
    for unit in units:
        check_replay(module, MODELS["gpt"], unit, 1)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_hooks_stay_out_of_code_compiled_meanwhile() -> None:
    module = MODELS["gpt"].build()
    capture = Capture(units_of(module)[1], 0, CPU)
    capture.install()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    one_step(compiled, MODELS["gpt"])  # type: ignore[arg-type]
    capture.remove()
    assert capture.captured is None
    torch._dynamo.reset()


def test_input_with_other_consumers_counts_this_unit_only() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
            self.other = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.other(x)
            result: torch.Tensor = x + self.inner(x) + self.inner(2 * x)
            return result

    model = Model(Residual, lambda seed: torch.full((3, 4), 0.5 + seed))
    module = Residual()
    inner = Unit("inner", module.inner)
    for call in range(4):
        record = check_replay(module, model, inner, call)
        assert any(item.name == "gradient of input 0" for item in record.items)


class WithLoss(nn.Module):
    """A model without blocks that returns its outputs and the loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.layers(x)
        return outputs, nn.functional.cross_entropy(outputs, targets) + outputs.square().mean()


def captured_losses(*, with_outputs: bool) -> Capture:
    torch.manual_seed(1)
    module = WithLoss()
    (unit,) = units_of(module)
    capture = Capture(unit, 0, CPU)
    capture.install()
    outputs, loss = module(torch.ones(2, 4), torch.tensor([1, 2]))
    (loss + outputs.sum() if with_outputs else loss).backward()
    capture.remove()
    return capture


def test_model_and_its_loss_are_replayed_together() -> None:
    capture = captured_losses(with_outputs=False)
    assert capture.captured is not None
    record = capture.captured.record
    assert not record.outputs_only
    assert not record.has_mixed_gradients
    again = replay(capture.unit, capture.captured, CPU)
    assert numbers(again) == numbers(record)
    assert {"output 1", "gradient of layers.0.weight", "gradient of layers.2.bias"} <= numbers(record).keys()


def test_sparse_gradients_are_compared_by_their_entries() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    model = Model(lambda: module, lambda seed: torch.tensor([1, 3, 1]))
    record = check_replay(module, model, units_of(module)[0], 1)
    assert numbers(record)["gradient of 0.weight"] != [None]


def test_outputs_without_known_tensors_are_refused() -> None:
    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:  # type: ignore[override]
            return object()

    module = Opaque(4, 4)
    capture = Capture(units_of(module)[0], 0, CPU)
    capture.install()
    module(torch.ones(1, 4))
    assert capture.captured is None
    assert capture.problem == "no tensors are found in what it returns (object)"


def test_wrong_result_changes_a_digest() -> None:
    module = MODELS["gpt"].build()
    unit = units_of(module)[2]
    capture = captured_step(module, MODELS["gpt"], unit, 0)
    assert capture.captured is not None
    original = unit.module.project.forward  # type: ignore[union-attr]
    unit.module.project.forward = lambda x: original(x) * (1 + 2**-20)  # type: ignore[union-attr]
    again = replay(unit, capture.captured, CPU)
    ours, theirs = capture.captured.record.parts(), again.parts()
    assert [bool(own == other) for own, other in zip(ours, theirs, strict=True)] == [False, False, False]


def test_replay_restores_attributes_and_tells_hooks() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0
            self.usage, self.losses, self.counts = torch.zeros(4), [0.0], {"calls": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.usage += 1
            self.losses.append(1.0)
            self.counts["calls"] += 1
            self.seen = x
            assert self.calls < 3 or is_replaying()
            result: torch.Tensor = self.layer(x)
            return result

    module = Counting()
    model = Model(Counting, lambda seed: torch.ones(1, 4))
    check_replay(module, model, units_of(module)[0], 0)
    assert module.calls == 2
    assert (module.usage.tolist(), module.losses, module.counts) == ([2.0] * 4, [0.0, 1.0, 1.0], {"calls": 2})
    assert not is_replaying()


def test_python_random_numbers_are_refused() -> None:
    import random

    class Skipping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * random.random()

    module = Skipping(4, 4)
    model = Model(lambda: Skipping(4, 4), lambda seed: torch.ones(1, 4))
    capture = captured_step(module, model, units_of(module)[0], 0)
    assert capture.captured is None
    assert "random numbers" in capture.problem


MODEL = Unit("model", nn.Linear(1 << 14, 1 << 14, bias=False, device="meta"))
GIB = 1 << 30


@pytest.mark.parametrize(("available", "ranks", "fits"), [(5, 1, True), (4, 1, False), (9, 2, False), (10, 2, True)])
def test_gradients_come_on_top_of_the_peak(available: int, ranks: int, fits: bool) -> None:
    words = describe_shortage(MODEL, MemoryLevels(available * GIB, 3 * GIB), ranks)
    needed = f"its audit needs {5 * ranks:.1f} GiB of memory, and {available:.1f} GiB are free"
    assert words == ("" if fits else needed)


def test_unknown_memory_is_no_reason() -> None:
    assert describe_shortage(MODEL, None, 1) == ""


def test_memory_of_this_machine_is_read() -> None:
    levels = read_memory_levels(CPU)
    assert levels is not None
    assert levels.available > 0
    assert levels.until_peak >= 0
