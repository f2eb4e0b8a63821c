"""Rules as data (TOML): the sample, the finding, its cure, its end, and the source of each threshold."""
