"""Keep a rank in its generations: worker, regrouping, aborts, interrupts and progress."""
