"""A transform that costs time: what it does to a text does not matter here."""

import time

SECONDS = 0.004


def slow(text: str) -> str:
    """Takes SECONDS of the CPU, and as many of the interpreter's lock, as a transform in Python would."""
    began = time.thread_time()
    while time.thread_time() - began < SECONDS:
        pass
    return text
