"""The only access to NVML, the kernel log, /sys and /proc, and the samples made of them. Tests can redirect each path.

Sampling schedules belong in ``sensors``.
"""
