"""The per-node launcher of a job: torchrun's flags, and ranks replaced one at a time.

``everstep-launch`` (``python -m everstep_trainer.launch``) runs on every node of a job, without importing torch. It
starts these processes::

    launcher ── zygote                torch imported, CUDA untouched, one thread; waits to fork a fork server
     │            └── fork server   shares the zygote's memory, so that the next one needs no import
     │                   ├── store host    the rendezvous store of generations that meet at this node
     │                   ├── worker        one per local rank: the user's script
     │                   └── standby       the user's script, up to its call of everstep.main
     ├── private controller         only if no agent was given or found; of several nodes, on the first
     └── private agent              only if no agent was given or found

A standby takes over a dead worker's local rank at once; all other ranks stay in place. A process that dies takes those
below it along: nothing outlives the launcher.
"""
