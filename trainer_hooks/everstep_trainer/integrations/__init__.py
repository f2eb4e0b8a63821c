"""Adapters that run other trainers on an Everstep run, one framework each. Imported only by the scripts that use them.

Nothing else of ``everstep_trainer`` may import an adapter, and none may be needed where its framework is not installed.
"""
