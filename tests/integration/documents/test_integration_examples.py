"""The example scripts of Lightning, Fabric, accelerate and transformers: a killed run ends as an undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes.launcher import ROOT, SLOW_RANKS, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.frameworks("lightning", "accelerate", "transformers"),
]

EXAMPLES = {
    "lightning": "lightning.pytorch",
    "fabric": "lightning.fabric",
    "accelerate": "accelerate",
    "transformers": "transformers.trainer",
}


def final_line(folder: Path, name: str, faults: str) -> str:
    """Return the line that rank 0 printed at the end of the example."""
    folder.mkdir()
    argv = ["--nproc-per-node", "2", "--standby-delay-s", "0.1", "--state-dir", str(folder / "s")]
    argv += ["--preload", EXAMPLES[name], "-m", "tests.integration.documents.killed_example", str(folder)]
    argv += [str(ROOT / "examples" / f"train_{name}.py"), faults, "--steps", "40"]
    with launched(folder, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **SLOW_RANKS) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0, launcher.err
    assert "not alike on all ranks" not in launcher.err + launcher.out
    struck = {path.name.removeprefix("struck-") for path in folder.glob("struck-*")}
    assert struck == set(filter(None, faults.split(",")))
    (line,) = re.findall(r"^final step=40 .*$", launcher.out, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("name", EXAMPLES)
def test_killed_example_ends_as_undisturbed(short_path: Path, name: str) -> None:
    undisturbed = final_line(short_path / "u", name, "")
    assert final_line(short_path / "k", name, "1:3:updated,0:16:updated,0:33:updated") == undisturbed
