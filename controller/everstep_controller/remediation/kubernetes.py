"""Remediate nodes through Kubernetes: cordon, taint and optionally evict; every step adds an event to the node.

Our cordon has the annotation ``everstep.dev/cordon`` with the remediation's id and reason, on a node whose
``unschedulable`` field was last set by us according to its managed fields (``kubectl cordon`` and ``uncordon`` do not
change annotations). Any other cordon stays untouched. Patches carry the resource version, so a taint added meanwhile is
not lost. A reboot is requested by the annotation ``everstep.dev/reboot``, for a site's own reboot controller, and is
done when the node's boot id has changed. Roles: ``deploy/helm/everstep/templates/remediation.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from everstep.errors import ConfigurationError, Conflict, Unavailable
from everstep.ids import NodeId
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation import remediator as interface
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus

TIMEOUT_S = 10.0
CORDON, REBOOT, REPAIR = "everstep.dev/cordon", "everstep.dev/reboot", "everstep.dev/repair"
NO_ANNOTATIONS = {CORDON: None, REBOOT: None, REPAIR: None}
TAINT = {"key": "everstep.dev/quarantined", "value": "true", "effect": "NoSchedule"}
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Annotation of a pod that mirrors a file on the node: evicting such a pod has no effect."""
UNKNOWN_FIELD_MANAGER = "ancient-changes"
"""Manager to which an API server assigns the oldest fields when there are more than ten managers."""
NODES_A_PAGE = 500


class Unanswered(Unavailable):
    """No answer arrived, not even a refusal."""


def connect(kubeconfig: str = "") -> Any:
    """Return the official client's ``CoreV1Api``, by ``kubeconfig`` or by the pod's service account.

    Raises ConfigurationError if the client is not installed or finds no cluster.
    """
    try:
        from kubernetes import client, config  # importing takes most of a second
    except ModuleNotFoundError:
        raise ConfigurationError(
            "remediation by Kubernetes needs its client: `pip install everstep[kubernetes]`"
        ) from None
    try:
        if kubeconfig:
            config.load_kube_config(kubeconfig)  # type: ignore[no-untyped-call]
        else:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise ConfigurationError(f"no Kubernetes cluster is configured: {error}") from error
    return client.CoreV1Api()


class KubernetesRemediator:
    """Implements ``Remediator``. A node's name is its name in the cluster.

    With ``evict``, a cordon also evicts the node's pods (except static ones and those of daemon sets) by the eviction
    API, which respects disruption budgets. Events are written to ``namespace``.
    """

    name = "kubernetes"
    dry_run = False
    kinds = frozenset(RemediationKind) - {RemediationKind.RESET_GPU}

    def __init__(self, api: Any, *, evict: bool = False, namespace: str = "default") -> None:
        self._api = api
        self._evict = evict
        self._namespace = namespace

    def apply(self, remediation: Remediation) -> None:
        node = self._call(self._api.read_node, remediation.node)
        if _is_others(node):
            if CORDON in _annotations(node):  # what remains of Everstep's cordon
                self._patch(node, _merge_patch(NO_ANNOTATIONS, taints=_others_taints(node)))
            raise interface.foreign_cordon(remediation.node)
        change = self._change(node, remediation)
        try:
            self._record_event(node, remediation)  # first: once the node shows the change, the request is not repeated
        finally:  # a refused event must not keep the node in service
            if change is not None:
                self._patch(node, change)
            if remediation.kind is RemediationKind.CORDON and self._evict:
                self._evict_pods(remediation.node)

    def _change(self, node: Any, remediation: Remediation) -> dict[str, Any] | None:
        """Return the patch that applies ``remediation``, or None if nothing needs to change."""
        notes = _annotations(node)
        match remediation.kind:
            case RemediationKind.CORDON | RemediationKind.REPAIR:
                mine = {CORDON: notes[CORDON] if _is_ours(node) else interface.cordon_reason(remediation)}
                if remediation.kind is RemediationKind.REPAIR:
                    mine[REPAIR] = interface.cordon_reason(remediation)
                if _is_ours(node) and mine.items() <= notes.items():
                    return None
                return _merge_patch(mine, unschedulable=True, taints=[*_others_taints(node), TAINT])
            case RemediationKind.UNCORDON:
                taints = _others_taints(node)
                is_marked = not NO_ANNOTATIONS.keys().isdisjoint(notes) or len(taints) < len(node.spec.taints or ())
                if not node.spec.unschedulable and not is_marked:
                    return None
                return _merge_patch(NO_ANNOTATIONS, unschedulable=False, taints=taints)
            case RemediationKind.REBOOT:
                if notes.get(REBOOT, "").startswith(remediation.id + " "):
                    return None
                return _merge_patch({REBOOT: f"{remediation.id} {_boot_id(node)}"})
            case _:
                raise Conflict(f"kubernetes cannot {remediation.kind}")

    def is_done(self, remediation: Remediation) -> bool:
        node = self._call(self._api.read_node, remediation.node)
        notes, is_out = _annotations(node), bool(node.spec.unschedulable)
        match remediation.kind:
            case RemediationKind.CORDON:
                return is_out and not (self._evict and self._pods(remediation.node))
            case RemediationKind.REPAIR:
                return is_out and notes.get(REPAIR, "").startswith(f"{CORDON_OWNER} {remediation.id}:")
            case RemediationKind.UNCORDON:
                if _is_others(node):
                    raise interface.foreign_cordon(remediation.node)
                return not is_out and CORDON not in notes
            case RemediationKind.REBOOT:
                id, _, boot_id = notes.get(REBOOT, "").partition(" ")
                return id == remediation.id and boot_id != _boot_id(node)
            case _:
                return False

    def _patch(self, node: Any, change: dict[str, Any]) -> None:
        """Patch the node if it is unchanged since it was read; otherwise a later attempt does."""
        change["metadata"]["resourceVersion"] = node.metadata.resource_version
        self._call(self._api.patch_node, node.metadata.name, change, field_manager=CORDON_OWNER)

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        wanted, found, more = set(nodes), dict[NodeId, CordonStatus](), None
        while True:
            page = self._call(self._api.list_node, limit=NODES_A_PAGE, _continue=more)
            for node in page.items:
                if node.metadata.name in wanted:
                    found[node.metadata.name] = _cordon_status(node)
            more = page.metadata._continue
            if not more:
                return found

    def close(self) -> None:
        self._api.api_client.close()

    # --- pods and events

    def _pods(self, node: NodeId) -> list[Any]:
        """Return the node's pods to evict: not static, finished, or of a daemon set."""
        listed = self._call(self._api.list_pod_for_all_namespaces, field_selector=f"spec.nodeName={node}")
        return [
            pod
            for pod in listed.items
            if pod.status.phase not in ("Succeeded", "Failed")
            and MIRROR_ANNOTATION not in (pod.metadata.annotations or {})
            and not any(owner.kind == "DaemonSet" for owner in pod.metadata.owner_references or ())
        ]

    def _evict_pods(self, node: NodeId) -> None:
        """Evict every pod. A refusal, as by a disruption budget (429), concerns one pod, and is raised at the end."""
        pods = self._pods(node)
        refusals: list[Conflict | Unavailable] = []
        for pod in pods:
            if pod.metadata.deletion_timestamp is None:
                meta = {"name": pod.metadata.name, "namespace": pod.metadata.namespace}
                body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
                evict = self._api.create_namespaced_pod_eviction
                try:
                    self._call(evict, meta["name"], meta["namespace"], body, allow_gone=True)
                except Unanswered:
                    raise  # each further pod would wait as long
                except (Conflict, Unavailable) as refusal:
                    refusals.append(refusal)
        if refusals:
            passing = [refusal for refusal in refusals if isinstance(refusal, Unavailable)]
            first = (passing or refusals)[0]
            kind = interface.RemediationIncomplete if passing else Conflict
            raise kind(f"{len(refusals)} pods of {len(pods)} stay on {node}: {first}") from first

    def _record_event(self, node: Any, remediation: Remediation) -> None:
        """Add an event to the node; it is named after the remediation, so it exists once."""
        at = datetime.fromtimestamp(remediation.at, UTC).isoformat().replace("+00:00", "Z")
        name = f"{CORDON_OWNER}.{remediation.id}".lower().replace("_", "-")
        event = {
            "metadata": {"name": name, "namespace": self._namespace},
            "involvedObject": {"kind": "Node", "name": remediation.node, "uid": node.metadata.uid},
            "reason": "Everstep" + remediation.kind.title().replace("_", ""),
            "message": remediation.sentence[:1024],
            "type": "Normal" if remediation.kind is RemediationKind.UNCORDON else "Warning",
            "source": {"component": CORDON_OWNER},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        self._call(self._api.create_namespaced_event, self._namespace, event, allow_gone=True)

    def _call(self, request: Callable[..., Any], *arguments: Any, allow_gone: bool = False, **options: Any) -> Any:
        """Send one request. ``allow_gone``: an object that exists already, or no longer exists, counts as success."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return request(*arguments, **options, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            if allow_gone and error.status in (404, 409):
                return None
            if error.status and 400 <= error.status < 500 and error.status not in (408, 409, 429):
                raise Conflict(f"kubernetes refuses: {error.status} {error.reason}") from error
            raise Unavailable(f"kubernetes: {error.status} {error.reason}") from error
        except (HTTPError, OSError) as error:
            raise Unanswered(f"kubernetes did not answer: {type(error).__name__}") from error


def _annotations(node: Any) -> dict[str, str]:
    return dict(node.metadata.annotations or {})


def _is_ours(node: Any) -> bool:
    """Return whether the node's cordon is ours. Without managed fields, our annotation decides."""
    set_by = {
        entry.manager
        for entry in node.metadata.managed_fields or ()
        if "f:unschedulable" in ((entry.fields_v1 or {}).get("f:spec") or {})
    }
    is_marked = bool(node.spec.unschedulable) and CORDON in _annotations(node)
    return is_marked and (not set_by or not set_by.isdisjoint((CORDON_OWNER, UNKNOWN_FIELD_MANAGER)))


def _is_others(node: Any) -> bool:
    return bool(node.spec.unschedulable) and not _is_ours(node)


def _others_taints(node: Any) -> list[Any]:
    """Return the taints that are not ours; the client serializes them in a patch."""
    return [taint for taint in node.spec.taints or () if taint.key != TAINT["key"]]


def _boot_id(node: Any) -> str:
    return str(node.status.node_info.boot_id)


def _merge_patch(annotations: Mapping[str, str | None], **spec: Any) -> dict[str, Any]:
    """Return a merge patch: an annotation of None is removed, and taints are replaced as a whole."""
    return {"metadata": {"annotations": annotations}, "spec": spec}


def _cordon_status(node: Any) -> CordonStatus:
    if not node.spec.unschedulable:
        return CordonStatus()
    if _is_others(node):
        return CordonStatus(cordoned_by="kubernetes", reason="cordoned")
    return CordonStatus(cordoned_by=CORDON_OWNER, reason=_annotations(node)[CORDON])
