"""Page of event kinds: what the controller writes into its event log, from the calls that write it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import everstep_controller
from tools.docs_site.markdown import code, table

_FOLDER = Path(everstep_controller.__file__).parent
_ENTRIES = ("EventLogEntry", "EventLogRow")


def page() -> str:
    """Return the page."""
    kinds: dict[str, list[str]] = {}
    for kind, sentences in sorted(event_kinds()):
        known = kinds.setdefault(kind, [])
        known += [sentence for sentence in sentences if sentence not in known]
    parts = [
        "# Events\n\n`everstep events`, `GET /v1/events` and its stream show these kinds; `?kind=` takes how a kind "
        "begins. Angle brackets stand for what differs from event to event. Sentences are shown as the code writes "
        "them; those that the code puts together from several parts are left out.\n"
    ]
    rows = [
        (code(kind), "<br>".join(_visible(sentence) for sentence in sentences)) for kind, sentences in kinds.items()
    ]
    parts.append(table(("Kind", "Sentence"), rows))
    return "\n".join(parts)


def _visible(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("*", r"\*").replace("`", r"\`").replace("_", r"\_")


def event_kinds() -> Iterator[tuple[str, list[str]]]:
    """Yield each kind with its sentences, call by call."""
    for path in sorted(_FOLDER.rglob("*.py")):
        source = path.read_text()
        if ".log_event(" not in source and not any(name in source for name in _ENTRIES):
            continue
        tree = ast.parse(source)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _in_function(function)


def _in_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        named = {word.arg: word.value for word in node.keywords}
        if isinstance(node.func, ast.Attribute) and node.func.attr == "log_event" and len(node.args) >= 2:
            kind, said = node.args[:2]
        elif ast.unparse(node.func).rpartition(".")[2] in _ENTRIES and {"kind", "sentence"} <= named.keys():
            kind, said = named["kind"], named["sentence"]
        else:
            continue
        for text in _texts(kind, function):
            yield text, _texts(said, function)


def _texts(value: ast.expr, function: ast.AST) -> list[str]:
    """Return what an expression may be as text, following names to what the function assigns to them."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [value.value]
    if isinstance(value, ast.JoinedStr):
        parts = [
            part.value if isinstance(part, ast.Constant) else f"<{_placeholder(part)}>"
            for part in value.values
            if not isinstance(part, ast.Constant) or isinstance(part.value, str)
        ]
        return ["".join(map(str, parts))]
    if isinstance(value, ast.IfExp):
        return _texts(value.body, function) + _texts(value.orelse, function)
    if isinstance(value, ast.Name):
        return [
            text
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and any(value.id in _names(target) for target in node.targets)
            for assigned in _assigned(node, value.id)
            for text in _texts(assigned, ast.Pass())
        ]
    return []


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _assigned(node: ast.Assign, name: str) -> list[ast.expr]:
    """Return what the assignment gives to ``name``, also as one of several."""
    found = []
    for target in node.targets:
        if isinstance(target, ast.Name):
            found.append(node.value)
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            found += [pair for to, pair in pairs if isinstance(to, ast.Name) and to.id == name]
    return found


def _placeholder(part: ast.expr) -> str:
    """Return a name for what an f-string fills in: the last word of a name or attribute, else three dots."""
    inner = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(inner, ast.Attribute):
        return inner.attr
    return inner.id if isinstance(inner, ast.Name) else "..."
