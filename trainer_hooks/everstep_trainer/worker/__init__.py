"""The process of one rank over its generations: join, call the training function, and attribute its errors.

What happens around the steps of one generation belongs in ``session``, the connection to the agent and the process
group in ``runtime``.
"""
