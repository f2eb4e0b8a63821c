"""Loading data so that a step's samples, and what is drawn at random for each, are a function of the step alone."""
