"""Event loop around the core: event intake, one transaction per batch of events, and directives pushed to agents.

Statements of the transaction belong in ``store``, and connections to agents in ``server``.
"""
