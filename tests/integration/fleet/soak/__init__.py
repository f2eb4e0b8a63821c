"""Kills things at random while a job trains, and looks whether it held and what is left behind.

    python -m tests.integration.fleet.soak --seconds 120 --seed 1 [--layout ddp|fsdp2] [--out out/soak] [--json FILE]

One controller, four nodes and a spare on this machine, a small training, and faults in bursts (50 ms to 3 s apart)
drawn from the seed. At the end every node must be back, the job must finish at the step that is then announced, and
what it computed is held against the same training with nothing happening to it.
"""
