"""A transform that costs time, as one in Python would: what it does to a text does not matter here."""

import os
import time

VARIABLE = "SLOW_MILLISECONDS"


def slow(text: str) -> str:
    """Returns the text, after as many milliseconds of the CPU, and of the interpreter's lock, as the
    environment says: none while stores are made, some while they are read."""
    until = time.thread_time() + float(os.environ.get(VARIABLE, 0)) / 1e3
    while time.thread_time() < until:
        pass
    return text
