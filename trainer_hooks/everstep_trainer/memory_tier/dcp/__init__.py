"""torch.distributed.checkpoint in the vaults' memory, for programs that save and load with their own code."""

from everstep_trainer.memory_tier.dcp.dcp_format import VaultLoadPlanner, VaultSavePlanner
from everstep_trainer.memory_tier.dcp.reader import VaultReader
from everstep_trainer.memory_tier.dcp.writer import VaultWriter
from everstep_trainer.memory_tier.tier import MemoryTier

__all__ = ["MemoryTier", "VaultLoadPlanner", "VaultReader", "VaultSavePlanner", "VaultWriter"]
