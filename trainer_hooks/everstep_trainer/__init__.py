"""Run a training script under Everstep: the code inside training processes, and their launcher.

``run.py`` and ``entry_point.py`` hold the API of training scripts, which import it as ``everstep``. The packages are
``runtime`` (generations, regrouping, aborts, progress), ``parallel`` (replicas and exact mode), ``data``, ``state``
(tracked objects), ``snapshot``, ``restore``, ``memory_tier`` (vault client and DCP tier), ``importers`` (ordinary
checkpoints), ``sdc`` (digests), ``launch`` and ``integrations``.
"""
