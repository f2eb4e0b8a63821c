"""What runs inside a training process, and the launcher that starts it.

``run.py`` and ``entry_point.py`` hold what a training script sees; scripts import them as ``everstep``. Below are the
parts: ``runtime`` (generations, regrouping, aborts, progress), ``parallel`` (replicas and exact mode), ``data``,
``state`` (what is tracked), ``snapshot``, ``restore``, ``memory_tier`` (the vault's client and the DCP tier),
``importers`` (ordinary checkpoints), ``sdc`` (digests), ``launch`` and ``integrations``.
"""
