"""Persistence with SQLAlchemy over SQLite or PostgreSQL, with one transaction per batch of events."""
