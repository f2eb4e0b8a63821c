"""A stub of the part of a Kubernetes API server that remediation uses, with its objects in memory.

Tests cannot use a real API server, so the answers follow its documentation. ``Node``, ``NodeList`` in pages, merge
patches with resource versions, ``Event``, ``PodList`` by field selector and ``Status``:
https://kubernetes.io/docs/reference/kubernetes-api/ and .../reference/using-api/api-concepts/; managed fields:
.../reference/using-api/server-side-apply/; ``Eviction``, with its answers if a disruption budget protects a pod (429)
or budgets conflict (500): .../concepts/scheduling-eviction/api-eviction/.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client


class Cluster:
    """A cluster of ``nodes``.

    ``calls``: (method, path, body) of each change. ``used``: the rights that requests needed, as (resource, verb).
    ``before_next_patch``: called once, between the reading of a node and its next patch. ``protected_pods``: pods of a
    disruption budget. ``unchangeable``: resources (``events``, ``nodes``, ...) that refuse changes.
    """

    def __init__(self, *nodes: str) -> None:
        self.nodes = {name: _node(name) for name in nodes}
        self.pods: dict[str, dict[str, Any]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str, Any]] = []
        self.used: set[tuple[str, str]] = set()
        self.is_unavailable = False
        self.protected_pods: set[str] = set()
        self.unchangeable: set[str] = set()
        self._clients: list[client.ApiClient] = []
        self.before_next_patch: Callable[[], object] | None = None
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                if self.command == "PATCH" and "merge-patch+json" not in self.headers["Content-Type"]:
                    status, answer = _status(415, "UnsupportedMediaType")
                else:
                    status, answer = cluster._answer(self.command, self.path, body)
                data = json.dumps(answer).encode()
                with suppress(ConnectionError):  # the client may have ended
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST = do_PATCH = _serve  # noqa: N815 - the library's names

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def api(self) -> client.CoreV1Api:
        """Return the official client, connected to this cluster."""
        configuration = client.Configuration()
        configuration.host = self.url
        configuration.retries = False
        api_client = client.ApiClient(configuration)
        self._clients.append(api_client)
        return client.CoreV1Api(api_client)

    def close(self) -> None:
        for api_client in self._clients:
            api_client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubectl(self, node: str, *, unschedulable: bool | None) -> None:
        """Act as ``kubectl cordon`` (True) or ``uncordon`` (None: the field is removed)."""
        _change(self.nodes[node], {"spec": {"unschedulable": unschedulable}}, "kubectl-cordon")

    def add_pod(self, name: str, node: str, owner: str = "ReplicaSet", **annotations: str) -> None:
        self.pods[name] = {
            "metadata": {
                "name": name,
                "namespace": "train",
                "annotations": annotations,
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "u"}],
            },
            "spec": {"nodeName": node, "containers": [{"name": "c"}]},
            "status": {"phase": "Running"},
        }

    def boot(self, node: str, boot_id: str) -> None:
        self.nodes[node]["status"]["nodeInfo"]["bootID"] = boot_id

    def _answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        place = parts.path.removeprefix("/api/v1/").split("/")
        resource, verb = _right(method, place)
        self.used.add((resource, verb))
        if self.is_unavailable:
            return _status(503, "ServiceUnavailable")
        if method != "GET":
            if resource in self.unchangeable:
                return _status(503, "ServiceUnavailable")
            self.calls.append((method, parts.path, body))
        if place[0] == "nodes":
            return self._nodes(method, place[1:], query, body)
        if place == ["pods"]:
            node = query["fieldSelector"].removeprefix("spec.nodeName=")
            pods = [pod for pod in self.pods.values() if pod["spec"]["nodeName"] == node]
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods}
        if place[0] == "namespaces" and place[2] == "events":
            name = body["metadata"]["name"]
            if name in self.events:
                return _status(409, "AlreadyExists")
            self.events[name] = body
            return 201, body
        if place[0] == "namespaces" and place[-1] == "eviction":
            if place[3] in self.protected_pods:
                return _status(429, "TooManyRequests")
            if self.pods.pop(place[3], None) is None:
                return _status(404, "NotFound")
            return 201, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": body["metadata"]}
        return _status(404, "NotFound")

    def _nodes(self, method: str, rest: list[str], query: dict[str, str], body: Any) -> tuple[int, Any]:
        if not rest:
            names, first = list(self.nodes), int(query.get("continue", "0"))
            end = first + 2  # pages of two for any requested limit, since a client must follow them
            more = {"continue": str(end)} if end < len(names) else {}
            items = [self.nodes[name] for name in names[first:end]]
            return 200, {"apiVersion": "v1", "kind": "NodeList", "metadata": more, "items": items}
        node = self.nodes.get(rest[0])
        if node is None:
            return _status(404, "NotFound")
        if method == "PATCH":
            call, self.before_next_patch = self.before_next_patch, None
            if call is not None:
                call()
            read = body["metadata"].get("resourceVersion")
            if read not in (None, node["metadata"]["resourceVersion"]):
                return _status(409, "Conflict")
            _change(node, body, query.get("fieldManager", "OpenAPI-Generator"))
        return 200, node


def _right(method: str, place: list[str]) -> tuple[str, str]:
    """Return the resource and the verb that a role must allow for a request.

    See kubernetes.io/docs/reference/access-authn-authz/authorization/, "Determine the request verb".
    """
    if place[0] == "namespaces" and len(place) > 2:
        place = place[2:]
    resource = "/".join([place[0], *place[2:]])
    read = "get" if len(place) > 1 else "list"
    return resource, {"GET": read, "POST": "create", "PATCH": "patch"}[method]


def _node(name: str) -> dict[str, Any]:
    info = dict.fromkeys(
        ("architecture", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion", "machineID")
        + ("operatingSystem", "osImage", "systemUUID"),
        "x",
    )
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": f"uid-{name}", "annotations": {"site": "a"}, "resourceVersion": "1"},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
        "status": {"nodeInfo": {**info, "bootID": "boot-1"}},
    }


def _change(node: dict[str, Any], patch: dict[str, Any], manager: str) -> None:
    """Patch the node under its next version. The manager of a set field is the client that last changed its value."""
    before, version = node["spec"].get("unschedulable"), int(node["metadata"]["resourceVersion"])
    _merge(node, patch)
    node["metadata"]["resourceVersion"] = str(version + 1)
    after = node["spec"].get("unschedulable")
    if after != before:
        entry = {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}
        node["metadata"]["managedFields"] = [entry] if after is not None else []


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    """Apply a JSON merge patch (RFC 7386)."""
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def _status(code: int, reason: str) -> tuple[int, Any]:
    return code, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}
