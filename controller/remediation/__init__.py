"""Telling the outside that a node should be drained, repaired or given back. Default: say it in the log only."""
