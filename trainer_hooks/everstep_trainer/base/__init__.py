"""Facts that every package may need: interrupts of the main thread, a rank's progress, requested bit flips, torch.

A module belongs here if packages on several layers use it, and it knows neither tracked state nor generations. The
rank's life in generations belongs in ``runtime``; settings belong in ``config``.
"""
