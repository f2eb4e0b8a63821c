"""Rules as data: which sample becomes which finding, what would cure it, when it is over, and whence its number."""
