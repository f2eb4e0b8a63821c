"""A real training run on this machine, five nodes of it, through everything that can befall them.

``world``    the processes: a controller, and per node an agent (with its vault) and a launcher (with its rank)
``train``    what the ranks run: ``examples/train_ddp.py`` or ``train_fsdp2.py``, with a log of every finished step
``faults``   what is done to them, one after another, and how each recovery is recognised
``watch``    the controller's events and states, as the demonstration sees them
``view``     the live picture on the terminal
``verify``   loss, samples and evictions held against what they must be
``report``   the HTML page and ``summary.json``
"""
