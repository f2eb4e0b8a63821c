"""Checkers of nodes: evictions, quarantine, remediations, maintenance, and returns to service."""
