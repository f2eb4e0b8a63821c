"""Notices of the provider or the site that this node will be reclaimed or maintained.

One module for each source; ``watch`` polls them and makes findings. The controller decides what follows.
"""
