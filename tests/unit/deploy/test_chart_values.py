"""Values of the chart: their comments, their schema, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.services.helm import CHART, chart, engine, notes, of_kind, render

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": {"registry": ""}}, "image.registry is missing: build the images"),
    ({"controller": {"replicas": 2}}, "SQLite is for one controller; set controller.database.kind=postgresql"),
    ({"controller": {"replicas": 0}}, "at '/controller/replicas': minimum: got 0, want 1"),
    ({"controller": {"database": {"kind": "mysql"}}}, "at '/controller/database/kind': value must be one of"),
    ({"controller": {"database": {"kind": "postgresql"}}}, "postgresql.secretName is missing: make a Secret"),
    ({"controller": {"settings": {"listen": "0.0.0.0:1"}}}, "controller.settings: the chart sets listen itself"),
    ({"controller": {"settings": {"Lease": 1}}}, "at '/controller/settings': additional properties 'Lease'"),
    ({"agent": {"settings": {"run_dir": "/run/x"}}}, "agent.settings: the chart sets run_dir itself"),
    ({"agent": {"pools": [{"name": "a", "settings": {"node": "n"}}]}}, r"agent.pools \(a\).settings: the chart"),
    ({"agent": {"pools": [{"name": "a"}, {"name": "a"}]}}, "two pools have the name a"),
    ({"agent": {"pools": [{"nodeSelector": {}}]}}, "at '/agent/pools/0': missing property 'name'"),
    ({"agent": {"hostPaths": {"runDir": "run"}}}, "at '/agent/hostPaths/runDir'"),
    ({"agent": {"ports": {"vault": 70000}}}, "at '/agent/ports/vault': maximum: got 70,000, want 65,535"),
    ({"remediation": {"backend": "webhook"}}, "needs remediation.webhook.url and remediation.webhook.secretName"),
    ({"remediation": {"mode": "enforce"}}, "remediation.mode=enforce needs remediation.backend=kubernetes"),
    ({"remediation": {"evictPods": True}}, "remediation.evictPods needs remediation.backend=kubernetes"),
    ({"alerts": {"tokenSecretName": "t"}}, "alerts.tokenSecretName needs alerts.url"),
    ({"networkPolicy": {"enabled": True}}, "networkPolicy.agentCIDRs is missing"),
    ({"user": {"uid": 0}}, "at '/user/uid': minimum: got 0, want 1"),
    ({"tls": {"enable": True}}, "at '/tls': additional properties 'enable' not allowed"),
    ({"monitoring": {"podMonitor": {"interval": "15"}}}, "at '/monitoring/podMonitor/interval'"),
]


def test_wrong_values_are_refused_with_the_correction() -> None:
    for values, message in REFUSED:
        with pytest.raises(engine().HelmError, match=message):
            render(values)


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values; a map whose keys the user chooses (settings, labels, resources) counts as one."""
    for name, value in values.items():
        if schema_at((*path, name)).get("properties"):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def schema_at(path: tuple[str, ...]) -> dict[str, Any]:
    found = SCHEMA
    for name in path:
        found = found["properties"][name]
    return found


def test_schema_knows_every_value_and_no_other() -> None:
    shown = set(leaves(VALUES))
    assert all(schema_at(path)["type"] for path in shown)
    known = set(_schema_leaves(SCHEMA)) - {("global",)}
    assert known == shown


def _schema_leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if schema.get("properties") and schema["type"] == "object":
        for name, inner in schema["properties"].items():
            yield from _schema_leaves(inner, (*path, name))
    else:
        yield path


def test_every_value_has_a_comment() -> None:
    """A comment above it, or above the group of a few short values that it belongs to."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    uncommented = []
    for number, line in enumerate(lines):
        if re.match(r" *[A-Za-z]+:", line) and not line.endswith(":"):
            before = next((above for above in reversed(lines[:number]) if above.strip()), "")
            if not before.lstrip().startswith("#") and "#" not in line:
                uncommented.append(line.strip().partition(":")[0])
    grouped = {
        "gid",
        "secretName",
        "stateDir",
        "sharedMemory",
        "enabled",
        "nodeSelector",
        "settings",
        "extraVolumeMounts",
    }
    assert set(uncommented) <= grouped | {"runDir", "uid", "url", "requests", "limits"}


def test_every_value_is_used_by_a_template() -> None:
    used = "\n".join(template["data"] for template in chart().templates)
    for path in _schema_leaves(SCHEMA):
        assert path == ("global",) or re.search(rf"\.{path[-1]}\b", used), path


def test_notes_name_prerequisites_and_first_commands() -> None:
    shown = notes({"secrets": {"create": False}})
    assert "everstep-fleet (key secret)" in shown
    assert "everstep-tls (keys tls.crt, tls.key, ca.crt)" in shown
    assert "--role operator" in notes()


def test_secrets_job_gets_another_name_when_it_changes() -> None:
    """A Job cannot be changed, and an upgrade must not try."""

    def name(values: dict[str, Any]) -> str:
        (job,) = of_kind(render(values), "Job")
        return str(job["metadata"]["name"])

    assert name({}) == name({"controller": {"settings": {"retention_days": 3}}})
    image: dict[str, Any] = {"image": {"registry": "r", "tag": "2"}}
    changed = [{}, image, {"tls": {"enabled": False}}, {"user": {"uid": 5}}]
    assert len({name(values) for values in changed}) == 4
