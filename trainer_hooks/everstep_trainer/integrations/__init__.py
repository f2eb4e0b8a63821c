"""Trainers of others, on runs of ours. Nothing here is imported unless it is asked for."""
