"""Checkers of the promises that every world must keep.

A checker knows observations (``tests.sim.cluster.observations``), and compares decisions with the world. Checkers of
one subject share a package. The modules of this package itself are shared by all checkers.
"""
