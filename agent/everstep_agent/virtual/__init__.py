"""A virtual machine behind the real drivers: scenario file, control file, and an NVML that pynvml takes for its own."""
