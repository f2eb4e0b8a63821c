"""The only access to NVML, the kernel log, /sys and /proc. Tests can redirect each root or path.

Sampling schedules belong in ``sensors``.
"""
