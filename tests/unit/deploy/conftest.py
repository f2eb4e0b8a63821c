"""Sets of values for the chart, each rendered once."""

from __future__ import annotations

from typing import Any

import pytest

ON = {"enabled": True}
SETS: dict[str, dict[str, Any]] = {
    "sqlite": {},
    "postgresql": {"controller": {"database": {"kind": "postgresql", "postgresql": {"secretName": "database"}}}},
    "password": {
        "controller": {
            "replicas": 3,
            "database": {"kind": "postgresql", "postgresql": {"secretName": "database", "passwordKey": "password"}},
        },
        "agent": {"hostNetwork": False},
    },
    "plain": {"tls": {"enabled": False}, "secrets": {"create": False}, "agent": {"kernelLog": False}},
    "monitored": {
        "monitoring": {"serviceMonitor": ON, "podMonitor": ON, "prometheusRule": ON, "dashboards": ON},
        "networkPolicy": {"enabled": True, "agentCIDRs": ["10.0.0.0/16"]},
        "remediation": {"backend": "kubernetes", "mode": "enforce", "evictPods": True},
        "alerts": {"url": "https://alerts.example/", "tokenSecretName": "alerts"},
        "image": {"registry": "registry.example/ml", "tag": "test", "pullSecrets": ["pull"]},
    },
    "pools": {
        "agent": {
            "hostNetwork": False,
            "probes": True,
            "imageName": "everstep-trainer",
            "settings": {"dcgm_names": True, "rack": "unknown"},
            "pools": [
                {"name": "r1", "nodeSelector": {"rack": "r1"}, "settings": {"rack": "r1"}},
                {"name": "r2", "nodeSelector": {"rack": "r2"}, "settings": {"vault_memory_limit_bytes": 1 << 40}},
            ],
        },
        "controller": {
            "settings": {"retention_days": 30, "operator_event_loop_share": 0.25, "policy_liveness_lost_after_s": 8}
        },
        "networkPolicy": ON,
        "remediation": {"backend": "webhook", "webhook": {"url": "https://hook.example/", "secretName": "hook"}},
    },
    "virtual": {"agent": {"virtual": "default:2"}, "fullnameOverride": "fleet"},
}
"""Values by name; together they take every branch of the templates."""


@pytest.fixture(scope="session")
def releases() -> dict[str, list[dict[str, Any]]]:
    from tests.support.services.helm import render  # not for tests of other folders

    return {name: render(values) for name, values in SETS.items()}
