"""Data loading in which a step's samples and random numbers are a function of the step alone.

So nothing here has state to store. Loaders and generators that have state of their own belong in ``state``.
"""
