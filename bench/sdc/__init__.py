"""Measure the chain of audits against silent corruption by injecting faults into real training on several ranks."""
