"""The Helm chart, rendered by Helm's own engine, and manifests checked against the schemas of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "everstep"
RELEASE, NAMESPACE = "everstep", "everstep-system"
CUSTOM = ("monitoring.coreos.com/v1",)
"""API groups of custom resources, for which Kubernetes has no schema."""

Manifest = dict[str, Any]


def engine() -> Any:
    """Helm's engine, or skip the test. Importing it starts threads, which workers that are forked later would lack."""
    return pytest.importorskip("helm_python", reason="Helm's engine is packaged for x86-64 only")


@cache
def chart() -> Any:
    """The chart, loaded."""
    return engine().Chart.load(CHART)


def render(values: Mapping[str, Any] | None = None, release: str = RELEASE) -> list[Manifest]:
    """Every manifest of a release, with an image registry unless ``values`` name one. Raises HelmError."""
    given = {"image": {"registry": "registry.example/ml"}, **(values or {})}
    texts = chart().render(values=given, name=release, namespace=NAMESPACE)
    return [
        one
        for name, text in texts.items()
        if not name.endswith("NOTES.txt")
        for one in yaml.load_all(text, yaml.CSafeLoader)
        if one is not None
    ]


def notes(values: Mapping[str, Any] | None = None) -> str:
    given = {"image": {"registry": "registry.example/ml"}, **(values or {})}
    return chart().render(values=given, name=RELEASE, namespace=NAMESPACE)["everstep/templates/NOTES.txt"]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def the(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name]
    return found


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Each pod's name and spec, also of templates inside a JobSet."""
    for one in manifests:
        name = f"{one['kind']}/{one['metadata'].get('name')}"
        if one["kind"] == "Pod":
            yield name, one["spec"]
        elif one["kind"] == "JobSet":
            for job in one["spec"]["replicatedJobs"]:
                yield f"{name}/{job['name']}", job["template"]["spec"]["template"]["spec"]
        elif "template" in one.get("spec", {}):
            yield name, one["spec"]["template"]["spec"]


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Each container's name, its pod's spec and its own."""
    for name, spec in pod_specs(manifests):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield f"{name}/{container['name']}", spec, container


def environment(container: Manifest, given: Mapping[str, str]) -> dict[str, str]:
    """A container's variables. ``given`` holds those that the cluster knows."""
    return {one["name"]: one.get("value", given.get(one["name"], "")) for one in container.get("env", ())}


def command_line(container: Manifest, given: Mapping[str, str]) -> list[str]:
    """Command and arguments, with $(NAME) replaced as the kubelet does."""
    words = [*container["command"], *container.get("args", ())]
    for name, value in environment(container, given).items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def check_schema(manifest: Manifest, version: str) -> None:
    """Raises ValidationError if Kubernetes of this version would not take the manifest. Unknown fields count."""
    with patch.object(kubernetes_validate.utils, "schema_contents", _schema_contents):
        kubernetes_validate.validate(manifest, version, strict=True)


_schema_contents = cache(kubernetes_validate.utils.schema_contents)
