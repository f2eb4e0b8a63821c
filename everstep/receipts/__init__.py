"""Receipts of jobs: as lines for a terminal, as a page of one file, and as files that remain after a run.

The controller makes a receipt (``everstep.wire.v1.receipts``). The launcher and the command ``everstep`` show and keep
it. Nothing here asks a controller or computes a cost.
"""
