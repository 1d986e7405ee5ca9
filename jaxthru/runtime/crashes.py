"""Crashes of C code: said in one line where somebody knows the reason, in place of a stack or of nothing."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

Reason = Callable[[], tuple[str, int] | None]
_reasons: dict[int, Reason | None] = {}
_before: dict[int, Any] = {}
_handlers: list[Any] = []  # which C calls: they have to live


def explain(number: signal.Signals, reason: Reason | None) -> None:
    """Has a crash of this process, by SIGABRT or SIGBUS, end it with the line and the exit code that `reason`
    returns; where it returns None, and where there is no reason, the crash goes on.

    `reason` is called in the thread that crashes, which need not be one of Python's.
    """
    _reasons[number] = reason
    if number not in _before:
        # One of Python's own would only note the signal, and the instruction that failed would fail again.
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_crash)
        _handlers.append(handler)
        _before[number] = _set(number, ctypes.cast(handler, ctypes.c_void_p))


def say(line: str) -> None:
    """Writes a line to stderr, whoever holds its lock."""
    with contextlib.suppress(OSError):  # of a log on the disk that is full
        os.write(2, f"jaxthru: {line}\n".encode())


def _set(number: int, handler: Any) -> Any:
    """Sets a handler of C's; returns the one before."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return libc.signal(number, handler)


def _on_crash(number: int) -> None:
    reason = _reasons[number]
    if reason and (found := reason()):
        line, code = found
        say(line)
        if number == signal.SIGBUS and (peers := sys.modules.get("jaxthru.runtime.peers")):
            peers.current().end(code, line)
        os._exit(code)
    _set(number, _before[number])  # what failed is tried again, and fails
