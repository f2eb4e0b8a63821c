"""Persistence with SQLAlchemy over SQLite or PostgreSQL, with one transaction per batch of events.

What is written is decided above: nothing here imports another package of the controller.
"""
