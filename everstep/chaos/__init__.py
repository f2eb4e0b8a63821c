"""Faults brought about on purpose in one's own running job, and reports of how it recovered.

``targets`` finds the job's processes on this machine, ``faults`` brings a fault about, ``recovery`` follows the job
until it has recovered. Nothing here decides about nodes or jobs. The command is ``everstep.cli.chaos``.
"""
