"""The remediator that the settings name."""

from __future__ import annotations

from controller.config import ControllerSettings, read_secret
from controller.remediation.base import Remediator
from controller.remediation.dry_run import DryRun
from controller.remediation.kubernetes import Kubernetes, connect
from controller.remediation.slurm import Slurm
from controller.remediation.webhook import Webhook
from everstep.clock import Clock


def remediator(settings: ControllerSettings, clock: Clock) -> Remediator:
    """Raises ConfigurationError where what it needs is missing."""
    match settings.remediation:
        case "webhook":
            secret = read_secret(settings.webhook_secret_file)
            return Webhook(settings.webhook_url, secret, wall=clock.wall, cordons=settings.webhook_cordons)
        case "slurm":
            return Slurm(configuration=settings.slurm_conf)
        case "kubernetes":
            return Kubernetes(connect(settings.kubeconfig), evict=settings.kubernetes_evict)
        case _:
            return DryRun()
