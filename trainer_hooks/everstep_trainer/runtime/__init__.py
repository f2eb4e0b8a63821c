"""Keep a rank in its generations: the worker, regrouping, aborts, interrupts and progress."""
