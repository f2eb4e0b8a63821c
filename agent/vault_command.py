"""How the supervisor starts its vault."""

from __future__ import annotations

import sys

from agent.config import AgentSettings


def vault_command(settings: AgentSettings, listen: str) -> list[str]:
    """The command line of a vault that listens at ``listen`` for other vaults."""
    command = [sys.executable, "-P", "-m", "agent.vault.main", "--node", settings.node, "--listen", listen]
    command += ["--run-dir", str(settings.run_dir), "--segment-dir", str(settings.segments)]
    command += ["--log-format", settings.log_format, "--log-level", settings.log_level]
    if settings.vault_memory_limit_bytes is not None:
        command += ["--memory-limit", str(settings.vault_memory_limit_bytes)]
    if settings.vault_send_bytes_per_s is not None:
        command += ["--send-rate", str(settings.vault_send_bytes_per_s)]
    if settings.die_with_parent and not settings.leave_vault:
        return [*command, "--die-with-parent"]
    return [*command, "--linger", str(settings.vault_linger_s)]
