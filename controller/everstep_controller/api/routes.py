"""Define the table of routes, from which the FastAPI application and the OpenAPI document are built."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from everstep.bearer_tokens import TokenRole
from everstep.ids import JobId, NodeId, NonNegativeInt, Rank, TraceId, full_match
from everstep.vocabulary import Decision, JobState, NodeState, Verdict
from everstep.wire.v1 import enrolment
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history as history
from everstep.wire.v1.receipts import JobReceipt
from everstep_controller.auth.authenticator import RouteAccess

READ, JOB, CHANGE = RouteAccess.READ, RouteAccess.JOB, RouteAccess.CHANGE
REASON = op.ReasonOnlyRequest


def _one_of(choices: type[StrEnum]) -> Any:
    """Return the values of an enumeration as a Literal: a parameter's schema must be self-contained."""
    return Literal[tuple(word.value for word in choices)]


def _some_of(choices: type[StrEnum]) -> Any:
    """Return a type for one or several comma-separated values of an enumeration."""
    one = "|".join(word.value for word in choices)
    return Annotated[str, full_match(f"({one})(,({one}))*")]


ShortParameter = Annotated[str, msgspec.Meta(max_length=64)]
DottedName = Annotated[str, full_match(r"[A-Za-z0-9._-]{1,128}")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

PATH_PARAMETERS: dict[str, Any] = {
    "node": NodeId,
    "job": JobId,
    "verdict": DottedName,
    "probe": DottedName,
    "order": Literal["drain", "hold", "release", "readmit", "evict", "repair", "forget"],
    "id": enrolment.CredentialId,
}
"""Types of path parameters, by name."""

QUERY_PARAMETERS: dict[str, Any] = {
    **dict.fromkeys(("node", "job", "kind", "rack", "switch", "gpu_model", "driver"), ShortParameter),
    **dict.fromkeys(("newest", "active", "verified", "local"), bool),
    **dict.fromkeys(("after", "limit"), NonNegativeInt),
    **dict.fromkeys(("since", "until", "restart_s"), Seconds),
    "rank": Rank,
    "lines": Annotated[int, msgspec.Meta(ge=1, le=200)],
    "checkpoint_interval_s": Annotated[float, msgspec.Meta(ge=1, le=1e12)],
    "trace": TraceId,
    "cursor": Annotated[str, msgspec.Meta(max_length=256)],
    "state": _some_of(NodeState),
    "job_state": _one_of(JobState),
    "remediation_state": Literal["requested", "started", "confirmed", "failed", "superseded"],
    "decision": _one_of(Decision),
    "role": _one_of(TokenRole),
    "subject": Annotated[str, msgspec.Meta(max_length=128)],
    "label": Annotated[str, msgspec.Meta(pattern=r"^[^=]+(=|$)", max_length=128)],
    "gpu": Annotated[str, msgspec.Meta(max_length=128)],
}
"""Types of query parameters, by name. An invalid value is refused, and so is a name that the route does not have."""

PARAMETERS = PATH_PARAMETERS | QUERY_PARAMETERS

PARAMETER_CHOICES: dict[str, tuple[str, ...]] = {
    "state": tuple(NodeState),
    **{name: get_args(kind) for name, kind in PARAMETERS.items() if get_origin(kind) is Literal},
}
"""Allowed values of enumerated parameters, for error messages."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route."""

    method: str
    path: str
    # With ``RouteAccess.JOB`` the path or query names the job; without a name the request is about all jobs.
    access: RouteAccess
    summary: str
    response: Any  # message type of the answer
    body: Any = None  # message type of the request's body
    query: tuple[str, ...] = ()  # names of optional parameters
    has_etag: bool = False  # the answer has an ETag
    # A route with a body names the GET route whose tag is compared with If-Match, or the reason why it needs none.
    etag_source: str = ""
    idempotency: str = ""


def _read(path: str, response: Any, summary: str, query: str = "", access: RouteAccess = READ) -> Route:
    """Return a GET route; ``query`` are the names of its parameters."""
    names = tuple(query.split())
    return Route(method="GET", path=path, access=access, summary=summary, response=response, query=names)


def _tagged(path: str, response: Any, summary: str, query: str = "", access: RouteAccess = READ) -> Route:
    return msgspec.structs.replace(_read(path, response, summary, query, access), has_etag=True)


def _change(
    path: str, body: Any, summary: str, etag_source: str, response: Any = op.ChangeResult, access: RouteAccess = CHANGE
) -> Route:
    return Route(
        method="POST", path=path, access=access, summary=summary, response=response, body=body, etag_source=etag_source
    )


ONE_SUBJECT = "/v1/nodes/{node}, or of /v1/nodes?rack=RACK"

OPERATOR_ROUTES: dict[str, Route] = {
    "status": _read("/v1/status", op.FleetStatus, "Summary of the fleet."),
    "identity": _read("/v1/identity", op.CallerIdentity, "Role and name of the caller."),
    "nodes": _tagged(
        "/v1/nodes", op.NodeList, "Nodes, in pages.", "state rack switch job gpu_model driver gpu label limit cursor"
    ),
    "node": _tagged("/v1/nodes/{node}", op.NodeDetail, "One node, with findings and newest verdicts."),
    "node_gpus": _read("/v1/nodes/{node}/gpus", op.NodeGpus, "The newest gauges of a node's GPUs."),
    "drift": _read(
        "/v1/drift",
        op.DriftList,
        "Values in which nodes differ from the majority of like nodes, in pages.",
        "limit cursor",
    ),
    "jobs": _read("/v1/jobs", op.JobList, "Jobs, in pages.", "job_state limit cursor"),
    "job": _tagged("/v1/jobs/{job}", op.JobDetail, "One job, with its ranks and recoveries.", access=JOB),
    "progress": _read(
        "/v1/jobs/{job}/progress", op.ProgressHistory, "Steps, step time and loss over the job's life.", "since", JOB
    ),
    "restorability": _read(
        "/v1/jobs/{job}/restorability",
        op.Restorability,
        "Version the job would restore now, and losses it would not survive.",
        access=JOB,
    ),
    "job_checkpoints": _read(
        "/v1/jobs/{job}/checkpoints",
        history.JobCheckpoints,
        "Versions the job could restore: in memory, by parity, on storage.",
        access=JOB,
    ),
    "receipt": _read(
        "/v1/jobs/{job}/receipt",
        JobReceipt,
        "What the job did and what failures cost, compared with restarts from checkpoints.",
        "until checkpoint_interval_s restart_s",
        JOB,
    ),
    # What a script prints may hold secrets, so viewers, such as dashboards, may not read it.
    "job_output": _read(
        "/v1/jobs/{job}/output",
        op.JobOutput,
        "The last lines that a job's ranks printed, if their launchers run on the controller's machine.",
        "rank lines",
        CHANGE,
    ),
    "probes": _tagged("/v1/probes", op.ProbeList, "The newest probes, in pages.", "node limit cursor"),
    "probe": _read("/v1/probes/{probe}", op.ProbeStatus, "One probe."),
    "start_probe": _change(
        "/v1/probes", op.StartProbe, "Start a probe: the nodes run an all-reduce.", "/v1/probes", op.ProbeStatus
    ),
    "reset_breaker": _change("/v1/breaker/reset", REASON, "Allow automatic evictions again.", "/v1/budget"),
    "stop": _change("/v1/jobs/{job}/stop", REASON, "Stop a job.", "/v1/jobs/{job}"),
    "resize": _change(
        "/v1/jobs/{job}/resize", op.Resize, "Limit a job's nodes from its next boundary on.", "/v1/jobs/{job}"
    ),
    "maintenance": _change(
        "/v1/maintenance", history.MaintenanceRequest, "Plan a maintenance window of a node or a rack.", ONE_SUBJECT
    ),
    "cancel_maintenance": _change(
        "/v1/maintenance/cancel",
        history.CancelMaintenance,
        "Cancel planned maintenance of a node or a rack.",
        ONE_SUBJECT,
    ),
    "order": _change(
        "/v1/nodes/{node}/{order}",
        REASON,
        "Drain, hold, release, readmit, evict, repair or forget a node.",
        "/v1/nodes/{node}",
    ),
}

HISTORY_ROUTES: dict[str, Route] = {
    "generations": _read("/v1/generations", op.GenerationList, "Rosters, oldest first.", "job limit cursor", JOB),
    "events": _read(
        "/v1/events", op.EventList, "The event log.", "after limit trace node job kind since until newest", JOB
    ),
    "orders": _read(
        "/v1/orders", op.EventList, "Orders of people, and their reasons.", "after limit node job since until newest"
    ),
    "findings": _read("/v1/findings", history.FindingList, "Findings, in pages.", "node kind active limit cursor"),
    "verdicts": _read("/v1/verdicts", history.VerdictList, "Verdicts, in pages.", "node decision limit cursor"),
    "verdict": _read("/v1/verdicts/{verdict}", Verdict, "One verdict, with its evidence."),
    "checkpoints": _read(
        "/v1/checkpoints", history.CheckpointList, "Committed versions, in pages.", "job verified limit cursor", JOB
    ),
    "remediations": _read(
        "/v1/remediations",
        history.RemediationList,
        "Actions on nodes, in pages.",
        "node remediation_state limit cursor",
    ),
    "evidence": _read(
        "/v1/nodes/{node}/evidence", history.Evidence, "All evidence of a node's faults, for its vendor."
    ),
}

POLICY_ROUTES: dict[str, Route] = {
    "policy": _tagged("/v1/policy", history.PolicyDocument, "The policy in force."),
    "check_policy": _change(
        "/v1/policy/check",
        history.PolicyChange,
        "Check whether a policy change is valid.",
        "/v1/policy",
        history.PolicyCheckResult,
        READ,
    ),
    "try_policy": Route(
        method="POST",
        path="/v1/policy/try",
        access=READ,
        summary="Result of replaying recent events under a changed policy; `local`: answer from this controller's own "
        "journal even if it is standby.",
        body=history.PolicyTrialRequest,
        response=history.PolicyTrialResult,
        query=("local",),
        etag_source="/v1/policy",
    ),
    "budget": _tagged("/v1/budget", history.BudgetStatus, "Nodes that may still be evicted, and deferred evictions."),
}

CREDENTIAL_ROUTES: dict[str, Route] = {
    "enrol": Route(
        method="POST",
        path="/v1/enrol",
        access=RouteAccess.JOIN,
        summary="Issue a node's own credential for a join token.",
        body=enrolment.Enrol,
        response=enrolment.Enrolled,
        idempotency="The same hash for the same node is answered as before",
    ),
    "issue_credential": _change(
        "/v1/credentials", enrolment.IssueRequest, "Issue a credential.", "/v1/credentials", enrolment.Issued
    ),
    "credentials": _tagged(
        "/v1/credentials",
        enrolment.CredentialList,
        "Credentials, without secrets, in pages.",
        "role subject limit cursor",
        CHANGE,
    ),
    "credential": _tagged(
        "/v1/credentials/{id}", enrolment.Credential, "One credential, without its secret.", access=CHANGE
    ),
    "revoke_credential": _change("/v1/credentials/{id}/revoke", REASON, "Revoke a credential.", "/v1/credentials/{id}"),
    "rotate_credential": _change(
        "/v1/credentials/{id}/rotate",
        enrolment.Rotate,
        "Replace a credential by a new one for its subject.",
        "/v1/credentials/{id}",
        enrolment.Issued,
    ),
}

ROUTES: dict[str, Route] = {**OPERATOR_ROUTES, **HISTORY_ROUTES, **POLICY_ROUTES, **CREDENTIAL_ROUTES}
"""Every route whose answer is a message."""

PLAIN_ROUTES: dict[str, Route] = {
    "stream": _read("/v1/events/stream", None, "New entries of the event log as server-sent events.", "after"),
    "metrics": _read("/metrics", None, "Metrics in Prometheus' text format."),
    "health": _read("/healthz", None, "Whether the process runs.", access=RouteAccess.OPEN),
    "ready": _read("/readyz", None, "Whether the controller serves.", access=RouteAccess.OPEN),
    "login_options": _read(
        "/v1/login/options", op.LoginOptions, "How people log in, if they can.", access=RouteAccess.OPEN
    ),
}
"""Routes whose answers are not messages, and those that anybody may ask."""
