"""Pack and install the packages that `make gpu` needs on a machine that reaches no package index.

    python -m bench.gpu_bundle pack [--to FOLDER]              # where there is an index
    python -m bench.gpu_bundle install VENV [--from FOLDER]    # where torch for CUDA is, and nothing is fetched

``pack`` downloads wheels for CPython 3.12 on x86-64, as constraints.txt pins them. ``install`` makes a virtual
environment that sees the packages of the Python that runs it, torch among them, and adds the wheels. Without a folder
of wheels it only checks that everything is there. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "gpu-bundle"
MOST_BYTES = 60 << 20
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
EXTRAS = ("agent", "controller")
TESTS = ("pytest", "pytest-timeout", "hypothesis")
LEFT_OUT = ("numpy", "torch")
"""They are on the machine already, and large."""
IMPORTED = (
    *("torch", "numpy", "msgspec", "xxhash", "typer", "rich", "pynvml", "prometheus_client", "fsspec", "fastapi"),
    *("uvicorn", "uvloop", "httptools", "sqlalchemy", "alembic", "psycopg", "pytest", "pytest_timeout", "hypothesis"),
)


def wanted() -> list[str]:
    """The requirements of pyproject.toml that the bundle holds, with those of the marked tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *(requirement for name in EXTRAS for requirement in extras[name])]
    kept = {requirement for requirement in found if _name(requirement) not in LEFT_OUT}
    return [*sorted(kept), *(requirement for requirement in extras["test"] if _name(requirement) in TESTS)]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def pack(folder: Path) -> int:
    """Download the wheels into ``folder``, which is emptied of others before; the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, *wanted()], check=True)
    return report(folder)


def report(folder: Path) -> int:
    """List the wheels, largest first. 1 where together they are larger than MOST_BYTES."""
    sizes = sorted(((wheel.stat().st_size, wheel.name) for wheel in folder.glob("*.whl")), reverse=True)
    for size, name in sizes:
        print(f"{size / (1 << 20):7.2f} MiB  {name}")
    total = sum(size for size, _ in sizes)
    print(f"{total / (1 << 20):7.2f} MiB  {len(sizes)} wheels in {folder}")
    if total > MOST_BYTES:
        print(f"The bundle may have {MOST_BYTES >> 20} MiB: leave something out in {Path(__file__).name}.")
        return 1
    return 0


def install(folder: Path, target: Path) -> int:
    """Make the environment ``target``; 1 where a package is missing in it afterwards."""
    venv.create(target, system_site_packages=True, clear=True, with_pip=False)
    python = target / "bin" / "python"
    (_purelib(python) / "everstep-gpu.pth").write_text("\n".join([*_seen_here(), str(ROOT)]) + "\n")
    wheels = sorted(folder.glob("*.whl"))
    if wheels:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
        command += ["--no-deps", "--ignore-installed", "--disable-pip-version-check"]
        subprocess.run([*command, *map(str, wheels)], check=True)
    missing = absent(python, IMPORTED)
    if missing:
        mend = "pack them with `make gpu-bundle` on a machine with a package index" if not wheels else "pack anew"
        print(f"{', '.join(missing)} cannot be imported by {python}: {mend}, and bring {folder.name}/ along.")
        return 1
    return 0


def _seen_here() -> list[str]:
    """Where this Python finds its packages: one of a virtual environment is not seen by an environment made from it."""
    return [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]


def _purelib(python: Path) -> Path:
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip())


def absent(python: Path, modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` that ``python`` does not find; none is imported."""
    asked = "import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if u.find_spec(m) is None))"
    done = subprocess.run([python, "-c", asked, *modules], capture_output=True, text=True, check=True)
    return done.stdout.split()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_bundle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download the wheels")
    packing.add_argument("--to", type=Path, default=BUNDLE)
    installing = commands.add_parser("install", help="make the environment")
    installing.add_argument("venv", type=Path)
    installing.add_argument("--from", dest="source", type=Path, default=BUNDLE)
    options = parser.parse_args(argv)
    return pack(options.to) if options.command == "pack" else install(options.source, options.venv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
