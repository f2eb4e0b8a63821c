"""Ranks in processes, the functions that they train, and stand-ins for their session, their GPU and their state."""
