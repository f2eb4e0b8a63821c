"""Render the Helm chart by Helm's own engine, and check manifests against the schemas of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "everstep"
RELEASE, NAMESPACE = "everstep", "everstep-system"
CUSTOM = ("monitoring.coreos.com/v1",)
"""API groups of custom resources, for which Kubernetes has no schema."""

Manifest = dict[str, Any]


def engine() -> Any:
    """Return Helm's engine, or skip the test. Its import starts threads, which workers forked later would lack."""
    return pytest.importorskip("helm_python", reason="Helm's engine is packaged for x86-64 only")


@cache
def chart() -> Any:
    """Return the loaded chart."""
    return engine().Chart.load(CHART)


def render(values: Mapping[str, Any] | None = None, release: str = RELEASE) -> list[Manifest]:
    """Return all manifests of a release, by default with an image registry. Raises HelmError."""
    merged = {"image": {"registry": "registry.example/ml"}, **(values or {})}
    texts = chart().render(values=merged, name=release, namespace=NAMESPACE)
    return [
        manifest
        for name, text in texts.items()
        if not name.endswith("NOTES.txt")
        for manifest in yaml.load_all(text, yaml.CSafeLoader)
        if manifest is not None
    ]


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return the notes that Helm prints after an installation."""
    merged = {"image": {"registry": "registry.example/ml"}, **(values or {})}
    rendered: dict[str, str] = chart().render(values=merged, name=RELEASE, namespace=NAMESPACE)
    return rendered["everstep/templates/NOTES.txt"]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Return the manifests of these kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def manifest_named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the only manifest of this kind and name."""
    (found,) = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the name and the spec of each pod, also of pod templates."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata'].get('name')}"
        if manifest["kind"] == "Pod":
            yield name, manifest["spec"]
        elif manifest["kind"] == "JobSet":
            for job in manifest["spec"]["replicatedJobs"]:
                yield f"{name}/{job['name']}", job["template"]["spec"]["template"]["spec"]
        elif "template" in manifest.get("spec", {}):
            yield name, manifest["spec"]["template"]["spec"]


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Yield the name of each container, its pod's spec and its own spec."""
    for name, spec in pod_specs(manifests):
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield f"{name}/{container['name']}", spec, container


def environment(container: Manifest, cluster_values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a container. ``cluster_values``: values of variables that the cluster sets."""
    variables = container.get("env", ())
    return {each["name"]: each.get("value", cluster_values.get(each["name"], "")) for each in variables}


def command_line(container: Manifest, cluster_values: Mapping[str, str]) -> list[str]:
    """Return command and arguments, with $(NAME) replaced as the kubelet does."""
    words = [*container["command"], *container.get("args", ())]
    for name, value in environment(container, cluster_values).items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def check_schema(manifest: Manifest, version: str) -> None:
    """Raise ValidationError if this version of Kubernetes refuses the manifest or does not know one of its fields."""
    with patch.object(kubernetes_validate.utils, "schema_contents", _schema_contents):
        kubernetes_validate.validate(manifest, version, strict=True)


_schema_contents = cache(kubernetes_validate.utils.schema_contents)
