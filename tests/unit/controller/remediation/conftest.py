from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.services import slurm


@pytest.fixture(scope="session")
def real_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """Skips where there can be none."""
    if why := slurm.missing():
        pytest.skip(why)
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
