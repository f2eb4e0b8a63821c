"""The per-node launcher of a job: torchrun's flags, one rank replaced at a time.

``everstep-launch`` (``python -m everstep_trainer.launch``) runs on every node of a job and holds four kinds of
processes, none of which it imports torch for::

    launcher ── zygote                torch imported, CUDA untouched, one thread; waits to fork a fork server
       │            └── fork server   shares the zygote's memory, so that the next one needs no import
       │                   ├── store host    the rendezvous store of generations that meet at this node
       │                   ├── worker        one per local rank: the user's script
       │                   └── standby       the user's script, up to its call of trainer_hooks.main
       ├── private controller         only where no agent was given or found
       └── private agent

A worker that dies is replaced by a standby at once, in its own local rank, while the other ranks stay where they
are. Whoever dies above takes what hangs below with it: nothing outlives the launcher.
"""
