"""Event loop around the core: event intake, one transaction per batch of events, and directives pushed to agents."""
