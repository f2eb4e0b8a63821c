"""The decision core: plain data in, plain data out.

``engine.handle(state, event, now)`` returns a list of effects. The core has no clock, no randomness and no I/O: the
caller passes the time, and events carry secrets and trace ids. Anything that reads a clock or does I/O belongs outside
this package.

A finding is judged without side effects, and the judgement is then carried out (``judgement.verdicts``). Jobs publish
moments, and checkpoints subscribe to them (``checkpoints.subscriptions``).

Modules are layers, from top to bottom:

* ``engine`` dispatches events; ``needs`` lists what a person must do.
* ``orders`` of operators, ``startup`` of a leader, ``retirement`` of nodes and jobs, ``liveness`` of nodes.
* ``judgement`` of evidence; ``maintenance`` of nodes by order.
* ``jobs`` and their generations; ``checkpoints`` of jobs; ``health`` of nodes; ``seats`` of nodes in jobs.
* ``transition`` collects the effects of one event and the records that it changes.
* ``effects``, ``state``, ``events``, ``policy``, ``records`` and ``wording`` are data and words.
"""
