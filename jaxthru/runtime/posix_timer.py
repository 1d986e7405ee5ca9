"""A POSIX timer that calls the C library at a set time, whatever the interpreter is doing."""

import ctypes
import os
import time

SIGEV_THREAD = 2


class PosixTimer:
    """Has the C library call one of its own functions, in a thread of its own, when a set time is over.

    No thread of Python's can run while a call into C keeps the interpreter's lock; this one needs nothing of
    the interpreter. A child process has none of its parent's timers. Source: timer_create(2), sigevent(3).
    """

    def __init__(self, function: str, argument: int):
        """function: takes one int or pointer. Raises OSError where there are no such timers, as on macOS."""
        # Which has the functions, or before glibc 2.34 is where they are; the rest it finds in libc itself.
        self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
        event = _Event(value=argument, notify=SIGEV_THREAD, function=address)
        self._timer = ctypes.c_void_p()
        self._call("timer_create", time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))

    def set(self, seconds: float) -> None:
        """Puts the call so many seconds from now."""
        first = _Times(first=(int(seconds), int(seconds % 1 * 1e9)))
        self._call("timer_settime", self._timer, 0, ctypes.byref(first), None)

    def close(self) -> None:
        """Gives the call up."""
        self._library.timer_delete(self._timer)  # which fails in a forked child, and need not do anything

    def _call(self, name: str, *arguments) -> None:
        if getattr(self._library, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


class _Event(ctypes.Structure):
    """struct sigevent of 64-bit Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 40),
    )


class _Times(ctypes.Structure):
    """struct itimerspec: two of seconds and nanoseconds."""

    _fields_ = (("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2))
