"""What the seconds mean: the breakdown of a step, advice, comparisons, and faults of the program."""
