"""``python -m bench.torchrun_script``: a script for torchrun, one rank killed, under torchrun and ``everstep-launch``.

Four ranks train the workload of ``bench.peers.torchrun_train``, which saves every ten steps. Rank 3 is killed with
SIGKILL. The time ends when all four new processes have finished a step. Launchers take turns, so that they meet the
same load. torchrun runs in the peers' environment under ``out/peers``, with the same torch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

from bench.peers import run as peers
from bench.recovery_rows.recoveries import Recovered

LAUNCHERS: dict[str, Callable[[], list[Recovered]]] = {
    "torchrun": partial(peers.torchrun, 3, "between"),
    "everstep-launch": partial(peers.everstep_launch, 3, "between"),
    "everstep-launch --torchrun-script": partial(peers.everstep_launch, 3, "between", "--torchrun-script"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torchrun_script", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    took: dict[str, list[Recovered]] = {name: [] for name in LAUNCHERS}
    for _ in range(options.repeats):
        for name, kill in LAUNCHERS.items():
            took[name] += kill()
            print(f"{name}: {took[name][-1]}", flush=True)
    for name, found in took.items():
        seconds = [recovery.seconds for recovery in found if recovery.seconds is not None]
        spread = (
            f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s" if seconds else ""
        )
        print(f"{name}: back {len(seconds)} of {len(found)} times; {spread}")


if __name__ == "__main__":
    main()
