"""Training scripts in many styles, whose ranks are killed at random moments of their steps."""
