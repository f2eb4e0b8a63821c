"""Adapters that run other trainers on an Everstep run. Imported only by the scripts that use them."""
