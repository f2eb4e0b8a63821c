"""The only doors to NVML, the kernel log, /sys and /proc; each has a root or a path that tests can point elsewhere."""
