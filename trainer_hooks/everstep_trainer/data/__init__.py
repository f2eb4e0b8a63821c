"""Data loading in which a step's samples and random numbers are a function of the step alone."""
