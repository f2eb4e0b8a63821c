"""Run schemathesis over the whole OpenAPI description, with all of its checks, against a controller process.

The checks: no status of 5xx; status codes, media types, headers and bodies as described; a request that fits the
description is accepted, and any other is refused; undescribed methods are refused with ``Allow``; every route checks
its credentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings

from everstep.wire.v1 import enrolment as wire
from everstep_controller.api.routes import ROUTES
from everstep_controller.api.web_page import openapi_document
from everstep_controller.auth.authenticator import RouteAccess
from tests.support.fleet.controllers import OPERATOR, ControllerProcess, controller_process
from tests.support.plugins.example_counts import FACTOR
from tests.support.processes.fork_pool import ForkPool

EXAMPLES = 3 * (FACTOR - 1)
"""Nightly examples per route and kind of data, besides the boundary values of the description."""
ENDLESS = "/v1/events/stream"

REFUSALS = ["400", "401", "403", "404", "405", "409", "412", "413", "415", "422", "426", "429"]
# 426: a registration may be well formed and offer only unsupported versions; 412: the tag does not match
ACCEPTED = ["2xx", "304", "401", "403", "404", "409", "412", "426"]
CONTRADICTABLE = ("POST /v1/maintenance", "POST /v1/maintenance/cancel", "POST /v1/policy/check", "POST /v1/policy/try")
"""Routes with well-formed messages that contradict themselves, such as a window without a subject."""
CONFIG = {
    "checks": {
        "positive_data_acceptance": {"expected-statuses": ACCEPTED},
        "negative_data_rejection": {"expected-statuses": REFUSALS},
    },
    "operations": [
        {
            "include-name": name,
            "checks": {"positive_data_acceptance": {"expected-statuses": [*ACCEPTED, "422"]}},
        }
        for name in CONTRADICTABLE
    ],
}
LABELS = [f"{method.upper()} {path}" for path, methods in openapi_document()["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis  # imported here, because each worker imports this module
    from schemathesis.config import SchemathesisConfig

    return schemathesis.openapi.from_dict(openapi_document(), config=SchemathesisConfig.from_dict(CONFIG))


@pytest.fixture(scope="module")
def process(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    limits = tmp_path_factory.mktemp("limits") / "limits.toml"
    limits.write_text("agent_requests_per_s = 1e6\nrequests_per_s = 1e6\nfailed_authentications_per_s = 1e6\n")
    with controller_process(
        tmp_path_factory.mktemp("controller"), program_forks, arguments=("--settings", str(limits))
    ) as process:
        yield process


@pytest.fixture(scope="module")
def join(process: ControllerProcess) -> dict[str, str]:
    wanted = wire.IssueJoin(reason="a test", uses=None, replace=True)
    status, body = process.ask("POST", "/v1/credentials", wanted)
    assert status == 200
    return {"Authorization": f"Bearer {msgspec.json.decode(body, type=wire.Issued).token}"}


def headers_for(case: Any, join: dict[str, str]) -> dict[str, str]:
    """The headers of a client that may use the route."""
    name = case.operation.definition.raw["operationId"]
    access = ROUTES[name].access if name in ROUTES else RouteAccess.READ
    if access is RouteAccess.JOIN:
        return join
    return OPERATOR


def as_integers(value: Any) -> Any:
    """JSON Schema accepts 7.0 as an integer; a controller requires 7, which no schema can express."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: as_integers(inner) for name, inner in value.items()}
    return [as_integers(inner) for inner in value] if isinstance(value, list) else value


def conforms(case: Any, process: ControllerProcess, join: dict[str, str]) -> None:
    """Send one request, and check the answer."""
    registers = case.operation.definition.raw["operationId"] == "register"
    if registers and isinstance(case.body, dict) and {"node"} <= {*case.body} & {*case.path_parameters}:
        case.body["node"] = case.path_parameters["node"]  # the two must agree, which no schema can express
    case.query.pop("cursor", None)  # only a cursor from an answer is accepted, which no schema can express
    case.body = as_integers(case.body)
    case.call_and_validate(base_url=process.url, headers=headers_for(case, join), timeout=120)


@pytest.mark.promise("robust-port")
@pytest.mark.parametrize("label", [label for label in LABELS if ENDLESS not in label])
def test_every_route_conforms_to_its_openapi_description(
    schema: Any, process: ControllerProcess, join: dict[str, str], label: str
) -> None:
    """The examples are made here, because schemathesis would make those of all routes in every worker's collection."""
    from schemathesis.generation.feedback import FeedbackSources
    from schemathesis.pytest._test_builder import build_operation_test

    method, path = label.split()
    chosen = settings(
        max_examples=max(1, EXAMPLES),
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate) if EXAMPLES else (Phase.explicit,),
        suppress_health_check=list(HealthCheck),
    )
    test = build_operation_test(
        config=schema.config,
        operation=schema[path][method],
        test_func=conforms,
        given_kwargs={},
        feedback=FeedbackSources(),
        explicit_settings=chosen,
    )
    test(process=process, join=join)
