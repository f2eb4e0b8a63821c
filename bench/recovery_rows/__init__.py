"""The runs of `bench.recovery`: training scripts, faults, and how each recovers. Other systems are in `bench.peers`."""
