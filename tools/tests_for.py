#!/usr/bin/env python3
"""Find the tests that depend on given files, by the imports of the whole repository.

``python tools/tests_for.py everstep/ids.py`` prints the test files that import the file, directly or through other
modules, nearest first. A test file also depends on the ``conftest.py`` files above it, and on every module whose dotted
name it holds as a string, because tests start programs by name. For a file that is not a Python module, such as a
transcript, the files that hold its name as a string count as importing it, and so do the files beside it that hold a
pattern for its name.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("agent", "controller", "trainer_hooks")
"""Folders that are on the import path themselves, beside the repository's root."""
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def module_name(path: str) -> str:
    """Return the dotted name under which a Python file is imported.

    Args:
        path: The file's path from the repository's root, with forward slashes.
    """
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if len(parts) > 1 and parts[0] in SOURCE_FOLDERS:
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


@functools.cache  # parsing every file of the repository takes seconds
def references(module: str, is_package: bool, source: str) -> tuple[set[str], set[str]]:
    """Return what a module's source refers to.

    Args:
        module: The module's dotted name, from which relative imports are resolved.
        is_package: Whether the source is a package's ``__init__.py``.
        source: The text of the file.

    Returns:
        Dotted names that may be modules, and the strings that may be names of files.
    """
    names: set[str] = set()
    strings: set[str] = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
            names.update(found.group() for found in NAME.finditer(node.value))
    return names, strings


def dependencies(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which files each Python file depends on directly.

    Args:
        files: The text of every file in the repository by its path; only the text of Python files is read.
    """
    modules = {module_name(path): path for path in files if path.endswith(".py")}
    data_files: dict[str, set[str]] = defaultdict(set)
    neighbours: dict[str, set[str]] = defaultdict(set)
    for path in files:
        if not path.endswith(".py"):
            data_files[PurePosixPath(path).name].add(path)
            neighbours[str(PurePosixPath(path).parent)].add(path)
    found: dict[str, set[str]] = {}
    for path, source in files.items():
        if not path.endswith(".py"):
            continue
        names, strings = references(module_name(path), path.endswith("__init__.py"), source)
        targets = {modules[name] for name in _with_parents(names) if name in modules}
        beside = neighbours[str(PurePosixPath(path).parent)]
        for string in strings:
            targets |= data_files.get(PurePosixPath(string).name, set())
            if "*" in string:
                targets |= {data for data in beside if fnmatch.fnmatchcase(PurePosixPath(data).name, string)}
        if path.startswith("tests/"):
            above = PurePosixPath(path).parents
            targets |= {conftest for folder in above if (conftest := str(folder / "conftest.py")) in files}
        found[path] = targets - {path}
    return found


def dependent_tests(changed: Iterable[str], files: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return the test files that depend on changed files.

    Args:
        changed: Paths of changed files. A changed test file is among the results.
        files: The text of every file in the repository by its path.

    Returns:
        Pairs of distance and path. The distance is the number of imports between the two, 0 for a changed test file.
        The nearest come first; of those as near, the tests named after a changed file come first.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for path, targets in dependencies(files).items():
        for target in targets:
            importers[target].add(path)
    start = list(changed)
    distance = dict.fromkeys(start, 0)
    queue = list(start)
    for path in queue:  # grows while it is walked: breadth first
        for importer in importers[path]:
            if importer not in distance:
                distance[importer] = distance[path] + 1
                queue.append(importer)
    stems = [PurePosixPath(path).stem for path in start]

    def order(path: str) -> tuple[int, bool, str]:
        return distance[path], not any(stem in path for stem in stems), path

    return [(distance[path], path) for path in sorted(filter(is_test, distance), key=order)]


def is_test(path: str) -> bool:
    """Tell whether pytest collects the file."""
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def repository_files(root: Path) -> dict[str, str]:
    """Return the text of every Python file, and the names of all other files, that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    paths = [path for path in listed.stdout.decode().split("\0") if path and (root / path).is_file()]
    return {path: (root / path).read_text(encoding="utf-8") if path.endswith(".py") else "" for path in paths}


def main(arguments: list[str] | None = None) -> int:
    """Print the paths of the test files that depend on the files named on the command line."""
    parser = argparse.ArgumentParser(description="Print the test files that depend on files, nearest first.")
    parser.add_argument("files", nargs="+", help="changed files")
    parser.add_argument("--distance", type=int, metavar="N", help="only test files at most N imports away")
    parser.add_argument("--show-distance", action="store_true", help="print each file's distance before it")
    options = parser.parse_args(arguments)
    changed = []
    for name in options.files:
        path = Path(name).resolve()
        known = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else name
        if not (ROOT / known).is_file():
            parser.error(f"{name} is not a file of this repository")
        changed.append(known)
    found = dependent_tests(changed, repository_files(ROOT))
    near = [(distance, path) for distance, path in found if options.distance is None or distance <= options.distance]
    for distance, path in near:
        print(f"{distance} {path}" if options.show_distance else path)
    if not near:
        print(f"no test depends on {', '.join(changed)}", file=sys.stderr)
    return 0 if near else 1  # pytest without arguments would run the whole suite


def _with_parents(names: Iterable[str]) -> Iterator[str]:
    """Yield each dotted name and the packages above it: importing a module also runs its packages."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


if __name__ == "__main__":
    sys.exit(main())
