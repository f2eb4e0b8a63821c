"""Measure the sensors: harmless events and faults on a virtual machine, a month of ordinary life, latency and memory.

Rows of events are in ``bench/sensor_events``. Rules and sensors belong in ``agent/everstep_agent``.
"""
