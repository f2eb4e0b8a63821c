"""Define every call of the REST API: path, parameters, body and type of the answer.

Each function makes a ``Call`` or a ``Listing``. ``Client`` and ``AsyncClient`` have a method for each of them, with the
same name and parameters, which sends it and returns the answer. Every order needs a reason, which the event log keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from everstep.client.exchange import Call, Listing, QueryValue, path
from everstep.vocabulary import Verdict
from everstep.wire.v1 import enrolment
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history as history
from everstep.wire.v1.receipts import JobReceipt
from everstep.wire.v1.training import GenerationSpec

T = TypeVar("T")

TRIAL_TIMEOUT_S = 600.0
"""Seconds that a controller may take to repeat its decisions of a month."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A health check's answer. ``role``: ``controller`` of the leader, or ``standby``."""

    ok: bool
    role: str = ""


def _get(url_path: str, kind: type[T], **query: QueryValue) -> Call[T]:
    return Call(method="GET", path=url_path, kind=kind, query=query)


def _post(url_path: str, body: Any, kind: type[T]) -> Call[T]:
    return Call(method="POST", path=url_path, kind=kind, body=body)


def _node_order(order: str, node: str, reason: str) -> Call[op.ChangeResult]:
    return _post(path("nodes", node, order), op.ReasonOnlyRequest(reason=reason), op.ChangeResult)


# ---- fleet


def status() -> Call[op.FleetStatus]:
    """Return a summary of the fleet.

    Example::

        with Client("https://controller:7700", token) as client:
            print(client.status().nodes)  # number of nodes by state
    """
    return _get("/v1/status", op.FleetStatus)


def identity() -> Call[op.CallerIdentity]:
    """Return the role and name of the caller, as the controller knows them."""
    return _get("/v1/identity", op.CallerIdentity)


def budget() -> Call[history.BudgetStatus]:
    """Return how many evictions are still allowed, and which ones are deferred."""
    return _get("/v1/budget", history.BudgetStatus)


def reset_breaker(*, reason: str) -> Call[op.ChangeResult]:
    """Allow automatic evictions again."""
    return _post("/v1/breaker/reset", op.ReasonOnlyRequest(reason=reason), op.ChangeResult)


def metrics() -> Call[str]:
    """Return the controller's metrics in Prometheus' text format."""
    return _get("/metrics", str)


def health() -> Call[Health]:
    """Return whether the controller's process runs."""
    return _get("/healthz", Health)


def ready() -> Call[Health]:
    """Return whether the controller serves. ``ok`` is False for a standby."""
    return Call(method="GET", path="/readyz", kind=Health, accepted_statuses=(503,))


def login_options() -> Call[op.LoginOptions]:
    """Return how people log in with accounts of the site's provider. It needs no token."""
    return _get("/v1/login/options", op.LoginOptions)


# ---- nodes


def nodes(
    *,
    state: str = "",
    rack: str = "",
    switch: str = "",
    job: str = "",
    gpu_model: str = "",
    driver: str = "",
    gpu: str = "",
    label: str = "",
) -> Listing[op.NodeList, op.NodeSummary]:
    """List nodes in the order of their names.

    Args:
        state: Only nodes in these states, separated by commas, such as ``lost,repair``.
        rack: Only nodes in this rack.
        switch: Only nodes at this switch.
        job: Only nodes of this job.
        gpu_model: Only nodes with GPUs whose model contains this text.
        driver: Only nodes with this driver version.
        gpu: Only the node with the GPU of this UUID or serial number.
        label: Only nodes with this label: ``NAME`` or ``NAME=VALUE``.

    Example::

        for node in client.nodes(state="lost,repair"):
            print(node.node, node.reason)
    """
    query = {"state": state, "rack": rack, "switch": switch, "job": job}
    query |= {"gpu_model": gpu_model, "driver": driver, "gpu": gpu, "label": label}
    return Listing(path="/v1/nodes", kind=op.NodeList, query=query)


def node(node: str) -> Call[op.NodeDetail]:
    """Return one node, with its findings and newest verdicts. Raises NotFound."""
    return _get(path("nodes", node), op.NodeDetail)


def node_gpus(node: str) -> Call[op.NodeGpus]:
    """Return the newest gauges of a node's GPUs: temperature, power, utilization, memory, clocks. Raises NotFound."""
    return _get(path("nodes", node, "gpus"), op.NodeGpus)


def drift() -> Listing[op.DriftList, op.Drift]:
    """List values in which nodes differ from the majority of like nodes: versions of software and firmware, GPUs."""
    return Listing(path="/v1/drift", kind=op.DriftList)


def evidence(node: str) -> Call[history.Evidence]:
    """Return all evidence of a node's faults, for its vendor."""
    return _get(path("nodes", node, "evidence"), history.Evidence)


def drain(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """Remove a node from its job at a step boundary, and hold it out of service.

    Example::

        change = client.drain("node-17", reason="replace the power supply")
        print(change.sentence)
    """
    return _node_order("drain", node, reason)


def hold(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """Keep a node out of new generations. Its running ranks continue."""
    return _node_order("hold", node, reason)


def release(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """End a hold or a drain. The node returns through a probe, or its remediation continues."""
    return _node_order("release", node, reason)


def readmit(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """Return a node to service, through a probe and probation."""
    return _node_order("readmit", node, reason)


def evict(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """Remove a node from all jobs at once, regardless of the eviction budget."""
    return _node_order("evict", node, reason)


def repair(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """Take a node out of service until a person readmits it."""
    return _node_order("repair", node, reason)


def forget(node: str, *, reason: str) -> Call[op.ChangeResult]:
    """Delete a node that no longer exists, with its records."""
    return _node_order("forget", node, reason)


def plan_maintenance(
    *, until: float, reason: str, starts_at: float | None = None, node: str | None = None, rack: str | None = None
) -> Call[op.ChangeResult]:
    """Plan a maintenance window of a node or of all nodes in a rack.

    Args:
        until: End of the window in wall seconds.
        reason: Reason, kept in the event log.
        starts_at: Begin of the window in wall seconds. Default: now.
        node: The node.
        rack: The rack, instead of a node.
    """
    window = history.MaintenanceRequest(starts_at=starts_at, until=until, reason=reason, node=node, rack=rack)
    return _post("/v1/maintenance", window, op.ChangeResult)


def cancel_maintenance(*, reason: str, node: str | None = None, rack: str | None = None) -> Call[op.ChangeResult]:
    """Cancel the planned maintenance of a node or of a rack."""
    plan = history.CancelMaintenance(reason=reason, node=node, rack=rack)
    return _post("/v1/maintenance/cancel", plan, op.ChangeResult)


# ---- jobs


def jobs(*, job_state: str = "") -> Listing[op.JobList, op.JobSummary]:
    """List jobs in the order of their names; with ``job_state`` only those in this state, such as ``paused``."""
    return Listing(path="/v1/jobs", kind=op.JobList, query={"job_state": job_state})


def job(job: str) -> Call[op.JobDetail]:
    """Return one job, with its ranks and recoveries. Raises NotFound."""
    return _get(path("jobs", job), op.JobDetail)


def progress(job: str, *, since: float | None = None) -> Call[op.ProgressHistory]:
    """Return steps, step time and loss over the job's life, since a time in wall seconds."""
    return _get(path("jobs", job, "progress"), op.ProgressHistory, since=since)


def receipt(
    job: str,
    *,
    until: float | None = None,
    checkpoint_interval_s: float | None = None,
    restart_s: float | None = None,
) -> Call[JobReceipt]:
    """Return what a job did, and what failures cost compared with restarts from checkpoints.

    Args:
        job: Name of the job.
        until: Wall seconds; later decisions are left out. Default: now.
        checkpoint_interval_s: Seconds between the checkpoints of the comparison. Default: 1,800.
        restart_s: Seconds of a restart of the comparison. Default: 60.
    """
    return _get(
        path("jobs", job, "receipt"),
        JobReceipt,
        until=until,
        checkpoint_interval_s=checkpoint_interval_s,
        restart_s=restart_s,
    )


def restorability(job: str) -> Call[op.Restorability]:
    """Return the version that the job would restore now, and the losses that it would not survive."""
    return _get(path("jobs", job, "restorability"), op.Restorability)


def job_checkpoints(job: str) -> Call[history.JobCheckpoints]:
    """Return the versions that the job could restore: in memory, by parity, on storage."""
    return _get(path("jobs", job, "checkpoints"), history.JobCheckpoints)


def job_output(job: str, *, rank: int | None = None, lines: int = 20) -> Call[op.JobOutput]:
    """Return the last lines that a job's ranks printed, if the controller runs on their machine as their user.

    Args:
        job: The job.
        rank: Only this rank.
        lines: Most lines of each rank, up to 200.

    Raises:
        NotFound: There is no such job or rank.
    """
    return _get(path("jobs", job, "output"), op.JobOutput, rank=rank, lines=lines)


def stop_job(job: str, *, reason: str) -> Call[op.ChangeResult]:
    """Stop a job."""
    return _post(path("jobs", job, "stop"), op.ReasonOnlyRequest(reason=reason), op.ChangeResult)


def resize_job(job: str, size: int, *, reason: str) -> Call[op.ChangeResult]:
    """Limit a job to ``size`` nodes, from its next step boundary on."""
    return _post(path("jobs", job, "resize"), op.Resize(size=size, reason=reason), op.ChangeResult)


# ---- probes


def probes(*, node: str = "") -> Listing[op.ProbeList, op.ProbeStatus]:
    """List probes since this controller leads, newest first."""
    return Listing(path="/v1/probes", kind=op.ProbeList, query={"node": node})


def probe(probe: str) -> Call[op.ProbeStatus]:
    """Return one probe. Raises NotFound."""
    return _get(path("probes", probe), op.ProbeStatus)


def start_probe(
    nodes: Sequence[str], *, reason: str, backend: Literal["gloo", "nccl"] = "gloo"
) -> Call[op.ProbeStatus]:
    """Ask nodes to run an all-reduce among them. Repeat ``probe`` until its ``ok`` is not None.

    Args:
        nodes: The nodes, at most 64.
        reason: Reason, kept in the event log.
        backend: ``gloo`` tests hosts, ``nccl`` tests GPUs.
    """
    return _post("/v1/probes", op.StartProbe(nodes=tuple(nodes), backend=backend, reason=reason), op.ProbeStatus)


# ---- history


def events(
    *,
    after: int = 0,
    trace: str = "",
    node: str = "",
    job: str = "",
    kind: str = "",
    since: float | None = None,
    until: float | None = None,
) -> Listing[op.EventList, op.Event]:
    """List the event log, oldest first.

    Args:
        after: Only events after the one of this number.
        trace: Only consequences of one request or report.
        node: Only events about this node.
        job: Only events about this job.
        kind: Only kinds with this prefix, such as ``verdict`` or ``node.lost``.
        since: Begin in wall seconds.
        until: End in wall seconds.

    Example::

        for event in client.events(node="node-17"):
            print(event.at, event.sentence)
    """
    query = {"trace": trace, "node": node, "job": job, "kind": kind, "since": since, "until": until}
    return Listing(path="/v1/events", kind=op.EventList, query=query, after=after)


def newest_events(
    limit: int = 50,
    *,
    trace: str = "",
    node: str = "",
    job: str = "",
    kind: str = "",
    since: float | None = None,
    until: float | None = None,
) -> Call[op.EventList]:
    """Return the newest ``limit`` events (at most 1000), oldest first. Filters as in ``events``."""
    query: dict[str, QueryValue] = {"limit": limit, "newest": True, "trace": trace, "node": node, "job": job}
    query |= {"kind": kind, "since": since, "until": until}
    return Call(method="GET", path="/v1/events", kind=op.EventList, query=query)


def orders(
    *, after: int = 0, node: str = "", job: str = "", since: float | None = None, until: float | None = None
) -> Listing[op.EventList, op.Event]:
    """List orders of people with their reasons, oldest first. Filters as in ``events``."""
    query = {"node": node, "job": job, "since": since, "until": until}
    return Listing(path="/v1/orders", kind=op.EventList, query=query, after=after)


def newest_orders(
    limit: int = 50, *, node: str = "", job: str = "", since: float | None = None, until: float | None = None
) -> Call[op.EventList]:
    """Return the newest ``limit`` orders of people (at most 1000), oldest first. Filters as in ``events``."""
    query: dict[str, QueryValue] = {
        "limit": limit,
        "newest": True,
        "node": node,
        "job": job,
        "since": since,
        "until": until,
    }
    return Call(method="GET", path="/v1/orders", kind=op.EventList, query=query)


def generations(*, job: str = "") -> Listing[op.GenerationList, GenerationSpec]:
    """List the rosters of jobs, newest first; as one answer (``collect``) oldest first."""
    return Listing(path="/v1/generations", kind=op.GenerationList, query={"job": job}, oldest_first=True)


def findings(
    *, node: str = "", kind: str = "", active: bool | None = None
) -> Listing[history.FindingList, history.FindingRecord]:
    """List findings on nodes, newest first.

    Args:
        node: Only findings on this node.
        kind: Only findings of this kind, such as ``gpu.xid``.
        active: Only findings that have not cleared (True), or have (False).
    """
    return Listing(path="/v1/findings", kind=history.FindingList, query={"node": node, "kind": kind, "active": active})


def verdicts(*, node: str = "", decision: str = "") -> Listing[history.VerdictList, Verdict]:
    """List verdicts on nodes, newest first; with ``decision`` only those, such as ``evict``."""
    return Listing(path="/v1/verdicts", kind=history.VerdictList, query={"node": node, "decision": decision})


def verdict(verdict: str) -> Call[Verdict]:
    """Return one verdict, with its evidence. Raises NotFound."""
    return _get(path("verdicts", verdict), Verdict)


def checkpoints(*, job: str = "", verified: bool | None = None) -> Listing[history.CheckpointList, history.Checkpoint]:
    """List committed versions, newest first; with ``verified`` only those that are (True) or are not (False)."""
    return Listing(path="/v1/checkpoints", kind=history.CheckpointList, query={"job": job, "verified": verified})


def remediations(
    *, node: str = "", remediation_state: str = ""
) -> Listing[history.RemediationList, history.RemediationStatus]:
    """List actions that were requested from Slurm, Kubernetes or the webhook, newest first.

    Args:
        node: Only actions on this node.
        remediation_state: Only ``requested``, ``started``, ``confirmed``, ``failed`` or ``superseded`` ones.
    """
    query = {"node": node, "remediation_state": remediation_state}
    return Listing(path="/v1/remediations", kind=history.RemediationList, query=query)


# ---- policy


def policy() -> Call[history.PolicyDocument]:
    """Return the decision policy in force."""
    return _get("/v1/policy", history.PolicyDocument)


def check_policy(change: history.PolicyChange) -> Call[history.PolicyCheckResult]:
    """Return whether a change of the policy is valid, and what it changes."""
    return _post("/v1/policy/check", change, history.PolicyCheckResult)


def try_policy(
    change: history.PolicyChange, *, hours: float = 168.0, local: bool = False
) -> Call[history.PolicyTrialResult]:
    """Decide recorded events again under a changed policy, and return the evictions that differ.

    Args:
        change: The change.
        hours: Hours of recorded events.
        local: Answer from the asked controller's own journal, even if it is standby.
    """
    return Call(
        method="POST",
        path="/v1/policy/try",
        kind=history.PolicyTrialResult,
        query={"local": local or None},
        body=history.PolicyTrialRequest(change=change, hours=hours),
        timeout_s=TRIAL_TIMEOUT_S,
    )


# ---- credentials


def credentials(*, role: str = "", subject: str = "") -> Listing[enrolment.CredentialList, enrolment.Credential]:
    """List credentials without their secrets, oldest first.

    Args:
        role: Only credentials of this role, such as ``operator``.
        subject: Only those of this node, job or person.
    """
    return Listing(path="/v1/credentials", kind=enrolment.CredentialList, query={"role": role, "subject": subject})


def credential(id: str) -> Call[enrolment.Credential]:
    """Return one credential, without its secret. Raises NotFound."""
    return _get(path("credentials", id), enrolment.Credential)


def issue_credential(request: enrolment.IssueRequest) -> Call[enrolment.Issued]:
    """Issue a credential. Its token is in this answer only.

    Example::

        request = IssueViewer(subject="wall-display", reason="the screen in the corridor")
        token = client.issue_credential(request).token
    """
    return _post("/v1/credentials", request, enrolment.Issued)


def revoke_credential(id: str, *, reason: str) -> Call[op.ChangeResult]:
    """Revoke a credential at once."""
    return _post(path("credentials", id, "revoke"), op.ReasonOnlyRequest(reason=reason), op.ChangeResult)


def rotate_credential(id: str, *, reason: str, grace_s: float = 3600.0) -> Call[enrolment.Issued]:
    """Issue a new credential for the same subject. The old one stays valid for ``grace_s`` seconds."""
    return _post(path("credentials", id, "rotate"), enrolment.Rotate(reason=reason, grace_s=grace_s), enrolment.Issued)


def enrol(node: str, secret_hash: str) -> Call[enrolment.Enrolled]:
    """Request a node's own credential with a join token, as agents do.

    Args:
        node: The node.
        secret_hash: SHA-256, in hex, of the secret part of its new token.
    """
    return _post("/v1/enrol", enrolment.Enrol(node=node, secret_hash=secret_hash), enrolment.Enrolled)
