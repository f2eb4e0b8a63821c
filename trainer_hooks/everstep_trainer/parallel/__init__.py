"""Divide a step over ranks: replicas of the model, gradients, and exact mode."""
