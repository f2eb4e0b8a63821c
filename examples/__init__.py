"""Training scripts to start from, and the demonstration."""
