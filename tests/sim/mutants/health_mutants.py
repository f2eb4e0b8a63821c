"""Mutants of verdicts: evictions, blame isolation, returns to service and remediations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from everstep_controller.core import maintenance
from everstep_controller.core.checkpoints import commits
from everstep_controller.core.health import eviction, node_state, outbreaks, quarantine
from everstep_controller.core.judgement import case_outcomes, verdicts
from everstep_controller.core.records import DiagnosticsStatus
from everstep_controller.remediation.executor import RemediationExecutor
from tests.sim.mutants.mutant import Mutant, do_nothing, return_empty, return_false
from tests.sim.mutants.patching import edited_function, edited_method, replaced_function


def _blame_one_of_a_tie(digests: Any, _spec: Any) -> commits.DigestVote:
    vote = commits.compare_digests(digests)
    return commits.DigestVote(divergent_ranks=vote.divergent_ranks or frozenset(sorted(vote.tied_ranks)[:1]))


def _allow_one_more_eviction(real: Any) -> AbstractContextManager[None]:
    """Allow one eviction more in ``real``: the budget of the fleet, of a rack or of a job."""

    def scope(*arguments: Any) -> Any:
        budget = real(*arguments)
        return msgspec.structs.replace(budget, limit=budget.limit + 1)

    return replaced_function(real, scope)


def _skip_diagnostics() -> AbstractContextManager[None]:
    """End probation without any diagnostic."""
    real = quarantine.run_next_diagnostic

    def pass_diagnostics(transition: Any, node: str) -> None:
        transition.state.nodes[node].quarantine.diagnostics = DiagnosticsStatus.PASSED

    return replaced_function(real, pass_diagnostics)


HEALTH_MUTANTS: tuple[Mutant, ...] = (
    # evictions and their budget
    Mutant(
        "the fleet's budget allows one eviction more",
        lambda: _allow_one_more_eviction(eviction.fleet_scope),
        seeds=(9,),
    ),
    Mutant(
        "a rack's budget allows one eviction more", lambda: _allow_one_more_eviction(eviction.rack_scope), seeds=(78,)
    ),
    Mutant(
        "a job's budget allows one eviction more", lambda: _allow_one_more_eviction(eviction.job_scope), seeds=(142,)
    ),
    Mutant(
        "evictions continue while the database is unavailable",
        lambda: edited_function(eviction.find_deferral, "if state.database.outage:", "if False:"),
        seeds=(93,),
    ),
    Mutant(
        "the tripped breaker does not forbid evictions",
        lambda: edited_function(eviction.find_deferral, "if state.fleet.breaker_reason:", "if False:"),
        seeds=(60,),
    ),
    Mutant(
        "an eviction may take a job below its minimum",
        lambda: replaced_function(eviction._shortage, return_empty),
        seeds=(93,),
    ),
    Mutant(
        "a tie of digests names a divergent node",
        lambda: replaced_function(commits.compare_digests_by_node, _blame_one_of_a_tie),
        seeds=(15, 34),
    ),
    # blame isolation
    Mutant("no eviction is rolled back", lambda: replaced_function(eviction._roll_back, do_nothing), seeds=(2,)),
    Mutant("no outbreak is recognised", lambda: replaced_function(outbreaks.common_cause, return_empty), seeds=(2,)),
    Mutant(
        "the breaker trips for a finding that other nodes share",
        lambda: replaced_function(outbreaks.shared_by_other, return_empty),
        seeds=(11, 58),
    ),
    Mutant(
        "a node that reports a slow pair is evicted without a second probe",
        lambda: edited_function(
            verdicts.judge, "rule.blame_isolation is BlameIsolationMethod.PAIR and not report.proof", "False"
        ),
        seeds=(2,),
    ),
    Mutant(
        "both nodes of a failed pair are evicted",
        lambda: edited_function(
            case_outcomes._settle_pair,
            "if node in case.failed and is_serving(transition.state, node):\n            "
            'proof = f"{case.summary}; it also failed with a known-good partner: {case.failed[node]}"',
            "if case.failed and is_serving(transition.state, node):\n            proof = case.summary",
        ),
        seeds=(6,),
    ),
    # returns to service
    Mutant("nodes come back without a probe", _skip_diagnostics),
    Mutant("quarantine never ends", lambda: replaced_function(quarantine.reconsider_quarantine, do_nothing)),
    Mutant(
        "findings raised while a node was held are forgotten",
        lambda: replaced_function(quarantine._has_blocking_finding, return_false),
        seeds=(124,),
    ),
    Mutant("probation never ends", lambda: replaced_function(quarantine.reconsider_probation, do_nothing)),
    # remediations and maintenance
    Mutant(
        "a foreign cordon is ignored",
        lambda: edited_function(
            node_state.out_of_service_reason, "if record.scheduling.external_cordon_by:", "if False:"
        ),
        (1,),
    ),
    Mutant(
        "a hold of a node that is out already is ignored",
        lambda: edited_function(
            maintenance.hold_node,
            "record.scheduling.hold_reason = sentence",
            "record.scheduling.hold_reason = sentence if record.state not in QUARANTINE_STATES else ''",
        ),
        seeds=(89,),
    ),
    Mutant(
        "a maintenance window is ignored",
        lambda: edited_function(
            node_state.out_of_service_reason, "if now < record.scheduling.maintenance_until:", "if False:"
        ),
        seeds=(29,),
    ),
    Mutant(
        "a remediation is requested again after a crash without reading it back",
        lambda: edited_method(RemediationExecutor, "_carry_out", "check_first=was_started", "check_first=False"),
        seeds=(0,),
    ),
    Mutant(
        "a remediation is requested before its start is written",
        lambda: edited_method(RemediationExecutor, "_carry_out", "await self._write(row)", "pass"),
        seeds=(28,),
    ),
    Mutant(
        "a node is reset without a cap",
        lambda: replaced_function(node_state.node_remediation_cap, return_empty),
        seeds=(114,),
    ),
    Mutant(
        "the whole fleet may be rebooted at once",
        lambda: replaced_function(node_state.fleet_remediation_cap, lambda transition: ("", 0.0)),
        seeds=(64,),
    ),
    Mutant("a cordoned node stays cordoned", lambda: replaced_function(node_state.uncordon, do_nothing), seeds=(1,)),
)
