"""Mutants: deliberate mistakes in the product, each of which a checker must detect."""
