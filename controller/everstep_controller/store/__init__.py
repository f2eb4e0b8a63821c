"""What the controller remembers: SQLAlchemy over SQLite or PostgreSQL, one transaction per batch of events."""
