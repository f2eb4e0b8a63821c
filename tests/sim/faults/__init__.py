"""Plans of worlds with their faults, and the injection of faults into a world."""
