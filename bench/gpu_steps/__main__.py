"""One step: python -m bench.gpu_steps NAME --device cuda --rows FILE."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from bench.gpu_steps import sheet


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_steps", description=__doc__)
    parser.add_argument("name", help="module of this package that has the step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same code in tiny sizes")
    parser.add_argument("--rows", type=Path, required=True, help="file for what is measured")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    step = importlib.import_module(f"bench.gpu_steps.{options.name}").step
    return sheet.run(options.name, step, sheet.Sheet(options.rows), options.device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
