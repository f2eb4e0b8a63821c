#!/usr/bin/env python3
"""Find the tests of given files: their own, and those that are few imports away.

``python tools/tests_for.py everstep/ids.py`` prints the test files that import the file, directly or through one other
module. A file's own tests come first: tests mirror the source tree, so ``tests/unit/everstep/test_ids.py`` tests
``everstep/ids.py``. A test file also depends on the ``conftest.py`` files above it, and on every module whose dotted
name it holds as a string, because tests start programs by name. For a file that is not a Python module, such as a
transcript, the files that hold its name as a string count as importing it, and so do the files beside it that hold a
pattern for its name.

To parse the whole repository takes seconds, so what each file refers to is kept in ``out/references.json``.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "out" / "references.json"
SOURCE_FOLDERS = ("agent", "controller", "trainer_hooks")
"""Folders that are on the import path themselves, beside the repository's root."""
DISTANCE = 2
"""Imports between a file and its tests, at most: three reach most of the suite from many modules."""
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
FILE_NAME = re.compile(r"[^\s]{1,200}")


class References(NamedTuple):
    """What a Python file refers to.

    Attributes:
        imports: Dotted names of modules, or of names in modules.
        quoted: Dotted names in strings, which may be modules.
        strings: Strings that may be names of files, or patterns for them.
    """

    imports: Collection[str]
    quoted: Collection[str]
    strings: Collection[str]


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


def references(path: str, source: str) -> References:
    """Return what the Python file at ``path`` with text ``source`` refers to."""
    imports: set[str] = set()
    quoted: set[str] = set()
    strings: set[str] = set()
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            imports.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            quoted.update(found.group() for found in NAME.finditer(node.value))
            if FILE_NAME.fullmatch(node.value):
                strings.add(node.value)
    return References(imports, quoted, strings)


def read_references(root: Path, paths: Iterable[str], cache: Path) -> dict[str, References]:
    """Return what each Python file refers to, and parse only the files that have changed since the last call.

    Args:
        root: The repository's root.
        paths: Paths from there; files that are not Python modules are left out.
        cache: File to keep the references in.
    """
    tool = _version(Path(__file__))
    try:
        stored = json.loads(cache.read_bytes())
        known = stored["files"] if stored["tool"] == tool else {}
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    files: dict[str, list[object]] = {}
    found: dict[str, References] = {}
    for path in paths:
        if not path.endswith(".py"):
            continue
        version = _version(root / path)
        entry = known.get(path)
        if entry is not None and entry[0] == version:
            found[path] = References(*entry[1:])
        else:
            found[path] = references(path, (root / path).read_text(encoding="utf-8"))
        files[path] = [version, *map(list, found[path])]
    if files != known:
        cache.parent.mkdir(exist_ok=True)
        partial = cache.with_suffix(".partial")
        partial.write_text(json.dumps({"tool": tool, "files": files}), encoding="utf-8")
        partial.replace(cache)
    return found


class Dependencies(NamedTuple):
    """What a Python file depends on directly.

    Attributes:
        files: Files that it imports or names.
        packages: The ``__init__.py`` files that only run because it imports a module below them.
    """

    files: set[str]
    packages: set[str]


def dependencies(paths: Iterable[str], refers: Mapping[str, References]) -> dict[str, Dependencies]:
    """Return what each Python file depends on directly.

    Args:
        paths: All files of the repository.
        refers: What each Python file refers to.
    """
    paths = set(paths)
    modules = {module_name(path): path for path in refers}
    data_files: dict[str, set[str]] = defaultdict(set)
    neighbours: dict[str, set[str]] = defaultdict(set)
    for path in paths.difference(refers):
        data_files[PurePosixPath(path).name].add(path)
        neighbours[str(PurePosixPath(path).parent)].add(path)
    chains: dict[str, list[str]] = {}  # most names occur in many files
    found: dict[str, Dependencies] = {}
    for path, (imports, quoted, strings) in refers.items():
        files: set[str] = set()
        packages: set[str] = set()
        for name in {*imports, *quoted}:
            if name not in chains:
                chains[name] = _modules_of(name, modules)
            if not (chain := chains[name]):
                continue
            nearest, *above = chain
            if name not in imports and nearest.endswith("__init__.py") and modules.get(name) != nearest:
                continue  # "everstep.rules" in a string names a file of another kind, nothing in everstep/__init__.py
            files.add(nearest)
            packages.update(above)
        beside = neighbours[str(PurePosixPath(path).parent)]
        for string in strings:
            files |= data_files.get(string.rpartition("/")[2], set())
            if "*" in string:
                files |= {data for data in beside if fnmatch.fnmatchcase(PurePosixPath(data).name, string)}
        if path.startswith("tests/"):
            folders = PurePosixPath(path).parents
            files |= {conftest for folder in folders if (conftest := str(folder / "conftest.py")) in paths}
        found[path] = Dependencies(files - {path}, packages - files - {path})
    return found


def dependent_tests(
    changed: Iterable[str], paths: Collection[str], refers: Mapping[str, References], most: int
) -> list[tuple[int, str]]:
    """Return the test files that depend on changed files.

    Args:
        changed: Paths of changed files. A changed test file is among the results.
        paths: All files of the repository.
        refers: What each Python file refers to.
        most: Greatest distance.

    Returns:
        Pairs of distance and path. The distance is the number of imports between the two: 0 for a changed test file, at
        most 1 for a file's own tests. The changed files and their own tests come first, then the nearest; of those as
        near, the tests in the mirrored folder come first.
    """
    start = list(changed)
    own = {test for path in start for test in own_tests(path, paths)}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, (files, packages) in dependencies(paths, refers).items():
        for target in files.union(packages.intersection(start)):
            importers[target].add(path)
    distance = dict.fromkeys(start, 0)
    queue = list(start)
    for path in queue:  # grows while it is walked: breadth first
        for importer in importers[path] if distance[path] < most else ():
            if importer not in distance:
                distance[importer] = distance[path] + 1
                queue.append(importer)
    distance.update((path, min(distance.get(path, 1), 1)) for path in own)
    folders = {folder for path in start for folder in _mirrored_folders(path)}

    def order(path: str) -> tuple[bool, int, bool, str]:
        is_own = path in own or distance[path] == 0
        return not is_own, distance[path], str(PurePosixPath(path).parent) not in folders, path

    return [(distance[path], path) for path in sorted(filter(is_test, distance), key=order)]


def own_tests(path: str, paths: Iterable[str]) -> list[str]:
    """Return the test files that lie in ``path``'s place of the mirrored tree and begin with its name."""
    folders, beginning = _mirrored_folders(path), f"test_{PurePosixPath(path).stem.strip('_')}"
    return [
        other
        for other in paths
        if is_test(other)
        and (place := PurePosixPath(other)).name.startswith(beginning)
        and str(place.parent) in folders
    ]


def is_test(path: str) -> bool:
    """Tell whether pytest collects the file."""
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def repository_paths(root: Path) -> list[str]:
    """Return the paths of all files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    return [path for path in listed.stdout.decode().split("\0") if path and (root / path).is_file()]


def main(arguments: list[str] | None = None) -> int:
    """Print the paths of the test files that depend on the files named on the command line."""
    parser = argparse.ArgumentParser(description="Print the tests of files, their own first, then the nearest.")
    parser.add_argument("files", nargs="+", help="changed files")
    parser.add_argument(
        "--distance", type=int, default=DISTANCE, metavar="N", help="test files at most N imports away (%(default)s)"
    )
    parser.add_argument("--show-distance", action="store_true", help="print each file's distance before it")
    options = parser.parse_args(arguments)
    changed = []
    for name in options.files:
        path = Path(name).resolve()
        known = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else name
        if not (ROOT / known).is_file():
            parser.error(f"{name} is not a file of this repository")
        changed.append(known)
    paths = repository_paths(ROOT)
    found = dependent_tests(changed, paths, read_references(ROOT, paths, CACHE), options.distance)
    for distance, path in found:
        print(f"{distance} {path}" if options.show_distance else path)
    if not found:
        print(f"no test within {options.distance} imports of {', '.join(changed)}", file=sys.stderr)
    return 0 if found else 1  # pytest without arguments would run the whole suite


def _mirrored_folders(path: str) -> list[str]:
    """Return the folders in which the tests of a file may lie: a wing's tests leave out the name of its package."""
    wing, *inner = PurePosixPath(path).parent.parts or ("",)
    if wing == "tests":
        return []
    if wing in SOURCE_FOLDERS:
        return ["/".join(["tests", "unit", wing, *inner[1:]])]
    return ["/".join(["tests", "unit", wing, *inner]), "/".join(["tests", "unit", *inner])]


def _modules_of(name: str, modules: Mapping[str, str]) -> list[str]:
    """Return the files of a dotted name: the longest beginning that is a module, then the packages above it."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return [modules[beginning] for beginning in beginnings if beginning in modules]


def _version(file: Path) -> list[int]:
    """Return what tells a changed file from the one that was read."""
    status = file.stat()
    return [status.st_mtime_ns, status.st_size]


if __name__ == "__main__":
    sys.exit(main())
