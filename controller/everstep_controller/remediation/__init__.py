"""Execution of remediation on machines: drain, reboot, hand to repair. The default only logs each action.

Whether a node needs remediation is decided in ``core``.
"""
