"""Pages of settings: every field of the agent, the controller, its decision policy and the training hooks.

Defaults, types and descriptions come from the structs and from the string literals below their fields.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from everstep_agent import config as agent_config
from everstep_controller import config as controller_config
from everstep_controller import main as controller_main
from everstep_controller.core.policy import CorePolicy
from everstep_trainer.config import HookSettings

from tools.docs_site.commands import argparse_flags, subparsers
from tools.docs_site.markdown import code, from_docstring, sentence, table


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a settings struct, under the comment that heads its group."""

    name: str
    type: str
    default: str
    description: str
    group: str


def settings_of(struct: type[msgspec.Struct]) -> list[Setting]:
    """Return a struct's own fields in the order of the source."""
    source = textwrap.dedent(inspect.getsource(struct))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines, found, group = source.splitlines(), [], ""
    described = _annotated_descriptions(struct)
    for index, node in enumerate(definition.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above = lines[node.lineno - 2].strip()
        if above.startswith("# "):
            group = above[2:].strip().capitalize()
        name = node.target.id
        found.append(
            Setting(
                name=name,
                type=_type_name(node.annotation),
                default=_default(struct, name),
                description=described.get(name) or _literal_below(definition.body, index),
                group=group,
            )
        )
    return found


def _annotated_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return descriptions that are given by ``Annotated[..., Meta(description=...)]``."""
    found = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, msgspec.Meta) and extra.description:
                found[name] = extra.description
    return found


def _literal_below(body: list[ast.stmt], index: int) -> str:
    following = body[index + 1] if index + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return str(following.value.value)
    return ""


def _type_name(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    return ast.unparse(annotation)


def _default(struct: type[msgspec.Struct], name: str) -> str:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    field = fields[name]
    if field.default_factory is not msgspec.NODEFAULT:
        return repr(field.default_factory())
    if field.default is msgspec.NODEFAULT:
        return ""
    value = field.default
    return repr(str(value)) if isinstance(value, str) else repr(value)


def _page(title: str, introduction: str, settings: list[Setting], names: Callable[[str], list[tuple[str, str]]]) -> str:
    parts, group = [f"# {title}\n\n{introduction}\n"], ""
    for setting in settings:
        if setting.group != group:
            group = setting.group
            parts.append(f"## {group}\n")
        facts = [("Type", code(setting.type)), ("Default", code(setting.default) or "none"), *names(setting.name)]
        line = " · ".join(f"{label}: {value}" for label, value in facts if value)
        parts.append(f"### `{setting.name}`\n\n{line}\n\n{sentence(setting.description)}\n")
    return "\n".join(parts)


def agent_page() -> str:
    """Return the page of the agent's settings."""
    flags = argparse_flags(agent_config._parser())

    def names(name: str) -> list[tuple[str, str]]:
        return [("Flag", code(flags[name])), ("Variable", code(agent_config.ENVIRONMENT_PREFIX + name.upper()))]

    introduction = (
        "`everstep-agent` takes each setting from its command line, then from the environment, then from the preset "
        "that `--preset` names, then from the default below.\n\n" + _presets(agent_config.PRESETS)
    )
    return _page("Agent settings", introduction, settings_of(agent_config.AgentSettings), names)


def _presets(presets: Any) -> str:
    said = []
    for name, values in presets.items():
        changed = ", ".join(f"`{key} = {value!r}`" for key, value in values.items())
        said.append(f"- Preset `{name}`: {changed or 'the defaults below'}.")
    return "\n".join(said)


def _changed(preset: msgspec.Struct, default: msgspec.Struct) -> str:
    """Return a section with what the preset ``lab`` changes."""
    rows = [
        (code(name), code(getattr(preset, name)), code(getattr(default, name)))
        for name in default.__struct_fields__
        if name not in ("policy", "rules") and getattr(preset, name) != getattr(default, name)
    ]
    return "\n## Preset lab\n\n" + table(("Setting", "With `lab`", "Default"), rows)


def controller_page() -> str:
    """Return the page of the controller's settings."""
    flags = argparse_flags(subparsers(controller_main._parser())["serve"])

    def names(name: str) -> list[tuple[str, str]]:
        return [
            ("Flag", code(flags.get(name, ""))),
            ("Variable", code(controller_config.ENVIRONMENT_PREFIX + name.upper())),
        ]

    kind = controller_config.ControllerSettings
    introduction = (
        "`everstep-controller serve` takes each setting from its command line, then from the TOML file that "
        "`--settings` names, then from the environment, then from the preset that `--preset` names (`production` "
        "unless said otherwise), then from the default below. How it decides is set by the "
        "[decision policy](policy.md)."
    )
    settings = [one for one in settings_of(kind) if one.name != "policy"]
    return _page("Controller settings", introduction, settings, names) + _changed(kind.preset("lab"), kind())


def policy_page() -> str:
    """Return the page of the decision policy."""

    def names(name: str) -> list[tuple[str, str]]:
        return [("Variable", code(controller_config.POLICY_PREFIX + name.upper()))]

    introduction = (
        "How the controller decides. In a settings file these stand under `[policy]`; `everstep policy check` and "
        "`everstep policy try` say what a change would do. Rules on single kinds of findings have "
        "[a page of their own](../findings.md)."
    )
    settings = [one for one in settings_of(CorePolicy) if one.name != "rules"]
    return _page("Decision policy", introduction, settings, names) + _changed(CorePolicy.lab_preset(), CorePolicy())


def trainer_page() -> str:
    """Return the page of the training hooks' settings."""
    introduction = from_docstring(HookSettings.__doc__) + (
        "\n\nGive them to `everstep.main(train, settings=everstep.HookSettings(...))`. Settings of the whole job are "
        "flags of [`everstep-launch`](../cli/everstep-launch.md)."
    )
    return _page("Training hook settings", introduction, settings_of(HookSettings), lambda _name: [])
