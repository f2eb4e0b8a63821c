"""Form jobs and move them between generations: membership, losses, hangs, stragglers."""
