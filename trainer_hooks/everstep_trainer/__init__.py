"""Run a training script under Everstep: the code inside training processes, and their launcher.

``run.py`` and ``entry_point.py`` hold the API of training scripts, which import it as ``everstep``. The packages are
layers; a package imports only those below it (a contract in ``pyproject.toml``). From top to bottom:

* ``integrations``: adapters for other trainers. ``worker``: the process of a rank over its generations.
* ``session``: the work around the steps of one generation.
* ``importers``: ordinary checkpoints. ``restore`` and ``snapshot``: versions in the vaults' memory.
* ``sdc``: audits against silent corruption. ``parallel``: replicas and exact mode.
* ``memory_tier``: torch.distributed.checkpoint in the vaults' memory. ``slots``: bytes of versions, read and written.
* ``state``: tracked objects. ``data``: samples by step. ``runtime``: process group, agent connection and aborts.
* ``base``: interrupts and progress. ``digests``: of tensors. ``launch``: the launcher, of which workers use some parts.
"""
