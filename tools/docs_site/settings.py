"""Pages of settings: every field of the agent, the controller, its decision policy and the training hooks.

Defaults, types and descriptions come from the structs and from the string literals below their fields.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from everstep.settings import Program, field_docs, flat_values, is_part
from everstep_agent import config as agent_config
from everstep_controller import config as controller_config
from everstep_controller.core.policy import CorePolicy
from everstep_trainer.config import HookSettings
from tools.docs_site.markdown import code, from_docstring, sentence, table


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a settings struct, below the comment that heads its group."""

    name: str
    type: str
    default: str
    description: str
    group: str


def settings_of(struct: type[msgspec.Struct]) -> list[Setting]:
    """Return a struct's own fields, and those of its parts, in the order of the source."""
    source = textwrap.dedent(inspect.getsource(struct))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines, found, group = source.splitlines(), [], ""
    docs, types = field_docs(struct), {field.name: field.type for field in msgspec.structs.fields(struct)}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above = lines[node.lineno - 2].strip()
        if above.startswith("# "):
            group = above[2:].strip().capitalize()
        name = node.target.id
        if is_part(types[name]):
            found += settings_of(types[name])
            continue
        found.append(
            Setting(
                name=name,
                type=ast.unparse(node.annotation),
                default=_default(struct, name),
                description=docs[name],
                group=group,
            )
        )
    return found


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
        parts.append(_entry(setting, setting.name, names))
    return "\n".join(parts)


def _entry(setting: Setting, heading: str, names: Callable[[str], list[tuple[str, str]]]) -> str:
    facts = [("Type", code(setting.type)), ("Default", code(setting.default) or "none"), *names(setting.name)]
    line = " · ".join(f"{label}: {value}" for label, value in facts if value)
    return f"### `{heading}`\n\n{line}\n\n{sentence(setting.description)}\n"


def _names(program: Program, *above: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function that gives the flag and the variable of a field, by the names of the structs ``above`` it."""
    by_path = {setting.path: setting for setting in program.settings.values()}

    def names(field: str) -> list[tuple[str, str]]:
        setting = by_path[(*above, field)]
        return [("Flag", code(setting.flag)), ("Variable", code(program.variable(setting.name)))]

    return names


_SOURCES = (
    "takes each setting from its flag, then from its environment variable, then from the key of the same name in the "
    "TOML file that `--settings` names, then from the preset that `--preset` names, then from the default below."
)


def agent_page() -> str:
    """Return the page of the agent's settings."""
    introduction = f"`everstep-agent` {_SOURCES}\n\n" + _presets(agent_config.PRESETS)
    settings = settings_of(agent_config.AgentSettings)
    return _page("Agent settings", introduction, settings, _names(agent_config.PROGRAM))


def _presets(presets: Any) -> str:
    lines = []
    for name, values in presets.items():
        changed = ", ".join(f"`{key} = {value!r}`" for key, value in values.items())
        lines.append(f"- Preset `{name}`: {changed or 'the defaults below'}.")
    return "\n".join(lines)


def _changed(preset: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """Return a section with what the preset ``lab`` changes."""
    rows = [(code(name), code(preset[name]), code(value)) for name, value in default.items() if preset[name] != value]
    return "\n## Preset lab\n\n" + table(("Setting", "With `lab`", "Default"), rows)


def controller_page() -> str:
    """Return the page of the controller's settings."""
    kind = controller_config.ControllerSettings
    introduction = (
        f"`everstep-controller serve` {_SOURCES} How the controller decides is set by the [decision policy](policy.md)."
    )
    elsewhere = ("policy", "oidc", *controller_config.PROGRAM.excluded)
    settings = [setting for setting in settings_of(kind) if setting.name not in elsewhere]
    page = _page("Controller settings", introduction, settings, _names(controller_config.PROGRAM))
    own = [setting.name for setting in settings if setting.name != "preset"]
    lab, default = ({name: flat_values(each)[name] for name in own} for each in (kind.from_preset("lab"), kind()))
    return page + _login_section() + _changed(lab, default)


def _login_section() -> str:
    """Return a section with the settings of people's login, by their names on the command line."""
    names = _names(controller_config.PROGRAM, "oidc")
    parts = [
        "\n## Login of people\n\nSee [Log in with the site's accounts](../../how-to/login.md). In a settings file "
        "these settings may also be in a table `[oidc]`, without `oidc_`.\n"
    ]
    parts += [_entry(setting, f"oidc_{setting.name}", names) for setting in settings_of(controller_config.OidcSettings)]
    return "\n".join(parts)


def policy_page() -> str:
    """Return the page of the decision policy."""
    introduction = (
        "How the controller decides. In a settings file these settings are in tables by topic, such as "
        "`[policy.liveness]`; `everstep policy check` and `everstep policy try` show the effect of a change. Rules on "
        "single kinds of findings have [a page of their own](../findings.md)."
    )
    parts = [f"# Decision policy\n\n{introduction}\n"]
    for topic in msgspec.structs.fields(CorePolicy):
        if topic.name != "rules":
            parts.append(f"## `[policy.{topic.name}]`\n\n{from_docstring(topic.type.__doc__)}\n")
            names = _names(controller_config.PROGRAM, "policy", topic.name)
            parts += [_entry(setting, f"{topic.name}.{setting.name}", names) for setting in settings_of(topic.type)]
    return "\n".join(parts) + _changed(CorePolicy.lab_preset().values(), CorePolicy().values())


def trainer_page() -> str:
    """Return the page of the training hooks' settings."""
    introduction = from_docstring(HookSettings.__doc__) + (
        "\n\nGive them to `everstep.main(train, settings=everstep.HookSettings(...))`. Settings of the whole job are "
        "flags of [`everstep-launch`](../cli/everstep-launch.md)."
    )
    return _page("Training hook settings", introduction, settings_of(HookSettings), lambda _name: [])
