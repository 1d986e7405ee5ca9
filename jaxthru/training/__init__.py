"""One training step, the state it moves, and what is kept of it."""
