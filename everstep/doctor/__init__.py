"""Checks of a machine that is about to train: memory, network, limits, GPUs, and access to the controller.

A check takes facts and returns results; ``run_checks`` collects the facts, and turns an error of a check into a
result. Nothing here changes the machine. torch is looked at in a child process (``everstep_trainer.base.torch_facts``),
since this package must not import it. The command is ``everstep.cli.doctor``.
"""
