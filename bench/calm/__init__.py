"""Ordinary programs on a day without a fault, real hangs, and honest programs under audits.

``program`` describes a program and what its ranks write down; ``programs`` has the programs; ``launched_run`` runs one
under everstep-launch or torchrun; ``harm`` says what a run suffered. ``hangs`` and ``honest`` are the other two parts.
"""
