"""torch.distributed.checkpoint over the vaults' memory, for programs that save and load with their own code."""

from trainer_hooks.dcp.planner import VaultLoadPlanner, VaultSavePlanner
from trainer_hooks.dcp.reader import VaultReader
from trainer_hooks.dcp.writer import VaultWriter
from trainer_hooks.tier import Tier

__all__ = ["Tier", "VaultLoadPlanner", "VaultReader", "VaultSavePlanner", "VaultWriter"]
