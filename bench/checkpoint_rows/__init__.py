"""What bench.checkpoint measures: the vault, the snapshot and the restore as they are, beside limits and peers."""
