"""A transform of a set cost, which the environment gives: none while stores are made, some while training."""

import os
import time

VARIABLE = "STARVED_MILLISECONDS"


def page(text: str) -> str:
    """Returns the text, after so many milliseconds of the CPU, and as many of the interpreter's lock."""
    until = time.thread_time() + float(os.environ.get(VARIABLE, 0)) / 1e3
    while time.thread_time() < until:
        pass
    return text
