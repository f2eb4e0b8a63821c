"""Parts of the adapter for Megatron-core that need no ranks: boxes of flat shards, process-wide state, refusals."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron's own: packages that are not installed
]


@pytest.mark.parametrize("size", [(), (7,), (3, 4), (1, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_flat_boxes_hold_each_element_in_order(size: tuple[int, ...]) -> None:
    from everstep_trainer.integrations.megatron import flat_boxes

    numbers = torch.arange(math.prod(size)).view(size)
    for start in range(numbers.numel() + 1):
        for end in range(start, numbers.numel() + 1):
            found = [
                element
                for box in flat_boxes(size, start, end)
                for element in numbers[
                    tuple(slice(at, at + n) for at, n in zip(box.offset, box.size, strict=True))
                ].flatten()
            ]
            assert found == list(range(start, end))


def test_reset_forgets_all_groups_of_a_generation() -> None:
    from megatron.core import parallel_state

    from everstep_trainer.integrations.megatron import reset_process_state

    parallel_state._DATA_PARALLEL_GLOBAL_RANKS = parallel_state._MPU_DATA_PARALLEL_RANK = 7
    parallel_state._HYBRID_DP_CP_GROUPS[2] = object()
    reset_process_state()
    assert parallel_state._DATA_PARALLEL_GLOBAL_RANKS is parallel_state._MPU_DATA_PARALLEL_RANK is None
    assert parallel_state._HYBRID_DP_CP_GROUPS == {}
