"""Execution of remediation on machines: drain, reboot, hand to repair. The default only logs each action."""
