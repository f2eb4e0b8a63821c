"""Checkers of the whole fleet: durable messages, reachable leaders, and recovery after the last fault."""
