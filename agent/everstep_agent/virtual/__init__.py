"""A simulated machine behind the real drivers: scenario file, control file, and an NVML library in Python.

Everything above the drivers is real code and belongs in its own package.
"""
