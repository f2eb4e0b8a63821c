"""Hold checkpoint slots in shared memory: segments, pages, reading, and adoption after a restart."""
