"""transformers' own Trainer on ranks that are killed: it goes on in memory, from the last update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep_trainer.data.epochs import EpochSampler, order_of
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.state.tracked_state import TrackedState
from tests.integration.frameworks.framework_run import run_training
from tests.support.ranks.exact_training import SEED, Fault
from tests.support.vaults.sealed_slots import load_checkpoint_alone

STEPS, WORLD, BATCH, SAMPLES = 12, 2, 8, 500
pytestmark = [pytest.mark.slow, pytest.mark.frameworks("transformers", "accelerate")]


def trained(folder: Path, *faults: Fault, **environment: str) -> list[dict[str, Any]]:
    """Return the step logs of ranks in an own folder."""
    options = ["--preload", "transformers.trainer,transformers.models.gpt2.modeling_gpt2"]
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rows, printed = run_training(
        folder, "transformers_training", STEPS, *faults, ranks=WORLD, options=options, **environment
    )
    assert "not alike on all ranks" not in printed
    return rows


@pytest.mark.promise("transformers")
@pytest.mark.parametrize(
    ("accumulates", "environment"),
    [
        pytest.param(3, {}, marks=pytest.mark.nightly),
        (3, {"TRANSFORMERS_EPOCHS": "1"}),
        pytest.param(1, {"TRANSFORMERS_FSDP": "1"}, marks=pytest.mark.nightly),
    ],
    ids=["accumulated", "epochs", "fsdp2"],
)
def test_transformers_trainer_resumes_from_last_update(
    short_path: Path, accumulates: int, environment: dict[str, str]
) -> None:
    faults = [Fault(1, 4, "forward"), Fault(0, 8, "updated")]
    rows = trained(short_path / "killed", *faults, TRANSFORMERS_ACCUMULATES=str(accumulates), **environment)
    sampler = ElasticSampler(SAMPLES, global_batch=BATCH, seed=SEED)
    if environment.get("TRANSFORMERS_EPOCHS"):
        texts: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(range(44), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
        sampler = EpochSampler(order_of(texts, None, 1, SEED))
    for step in range(1, STEPS + 1):
        of_step = sorted((r for r in rows if r["step"] == step), key=lambda r: (r["generation"], r["rank"]))
        last = [row for row in of_step if row["generation"] == of_step[-1]["generation"]]
        batches = range((step - 1) * accumulates + 1, step * accumulates + 1)
        expected = [i for batch in batches for i in sampler.global_indices(batch).tolist()]
        seen = [i for row in last for i in row["samples"]]
        if len(last) == WORLD:
            assert sorted(seen) == sorted(expected)
        else:
            assert step in {fault.step - n for fault in faults for n in (0, 1)}, "a rank died before it wrote"
            assert set(seen) <= set(expected)
        assert len({row["state"] for row in of_step}) == len({row["rate"] for row in of_step}) == 1, "the same on all"
    assert len({row["rate"] for row in rows}) == STEPS, "the schedule went on"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("largest", ["4KB", "1GB"])
def test_start_reads_save_pretrained_output(tmp_path: Path, tied: bool, largest: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=30, tie_word_embeddings=tied)
    before, after = LlamaForCausalLM(config), LlamaForCausalLM(config)
    before.save_pretrained(tmp_path, max_shard_size=largest)
    assert (tmp_path / "model.safetensors.index.json").exists() is (largest == "4KB")
    tracked: dict[str, Any] = {"model": after}
    load_checkpoint_alone(tmp_path, tracked, TrackedState(tracked))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    base = LlamaForCausalLM(config).model
    tracked = {"backbone": base}
    load_checkpoint_alone(tmp_path, tracked, TrackedState(tracked))
    assert all(torch.equal(a, b) for a, b in zip(before.model.parameters(), base.parameters(), strict=True))
