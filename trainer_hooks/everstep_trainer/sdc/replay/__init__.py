"""Compute calls of a rank again on another rank: capture a call, send it, redo it, compare the bits."""
