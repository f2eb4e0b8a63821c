"""MkDocs hook: add the pages that are made from the code, and take every script from the site itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.docs_site import (
    client_methods,
    commands,
    events,
    findings,
    metrics,
    python_api,
    rest,
    scenarios,
    settings,
    signals,
)

PAGES: dict[str, Callable[[], str]] = {
    "reference/python.md": python_api.page,
    "reference/client-methods.md": client_methods.page,
    "reference/cli/everstep.md": commands.everstep_page,
    "reference/cli/everstep-agent.md": commands.agent_page,
    "reference/cli/everstep-controller.md": commands.controller_page,
    "reference/cli/everstep-launch.md": commands.launch_page,
    "reference/settings/agent.md": settings.agent_page,
    "reference/settings/controller.md": settings.controller_page,
    "reference/settings/policy.md": settings.policy_page,
    "reference/settings/trainer.md": settings.trainer_page,
    "reference/rest.md": rest.routes_page,
    "reference/rest-models.md": rest.models_page,
    "reference/metrics.md": metrics.page,
    "reference/findings.md": findings.page,
    "reference/signals.md": signals.page,
    "reference/events.md": events.page,
    "contributing/transcripts.md": scenarios.page,
}
"""What is made, by its place in the site."""

_ROOT = Path(__file__).parents[2]
_RELATIVE_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>\.\.?/[^)#\s]+)\)")
_WORKER_ADDRESS = "https://unpkg.com/iframe-worker/shim"
"""Where the theme has the script from by which search works in files; version 1.0.4 of it is in docs/assets."""
_MERMAID_SCRIPT = re.compile(r'<script src="[^"]*mermaid\.min\.js"></script>\s*')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Show links to files of the repository outside docs/ as plain code: they work there, and not on the site."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link["target"]))
        outside = not target.is_relative_to(config.docs_dir) and target.is_relative_to(_ROOT)
        return f"`{target.relative_to(_ROOT)}`" if outside and target.exists() else link[0]

    return _RELATIVE_LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the double colons that introduce examples in docstrings."""
    return re.sub(r"::</p>", ":</p>", re.sub(r"<p>::</p>\s*", "", html))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page that a server shows for a missing address."""
    return _bundled(output_content, "/")


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Take scripts from the site itself, and leave out Mermaid's three megabytes where no diagram is."""
    return _bundled(output, "../" * page.url.count("/"))


def _bundled(html: str, root: str) -> str:
    html = html.replace(_WORKER_ADDRESS, f"{root}assets/javascripts/iframe-worker.js")
    return html if 'class="mermaid"' in html else _MERMAID_SCRIPT.sub("", html)
