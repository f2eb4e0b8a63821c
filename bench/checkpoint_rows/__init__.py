"""Measurements of bench.checkpoint: vault, snapshot and restore, compared with limits and other systems."""
