"""SIGTERM while there is nothing to save: the command ends within seconds, with the exit code of a stop.

The kernel passes over SIGTERM for a process without a handler that is the first of its container. While steps
run, `runtime.stop_signal` has the signal; before and after, what is here.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

from jaxthru.runtime import crashes
from jaxthru.runtime.exit_codes import STOPPED

SECONDS_TO_UNWIND = 5.0
"""How long the main thread may take to leave what it does. It may be within a compiler, and hear nothing."""
SAID = "told to stop (SIGTERM) while there was nothing to save; nothing is lost: start the same command again"


class Terminated(BaseException):
    """SIGTERM has come. Like KeyboardInterrupt it is no Exception: who handles faults is not to handle it."""


class _Process:
    """What SIGTERM does to this process. code: with which it ends. within: commands, one in the other, that
    leave what they do by an exception. over: how many have ended. heard: how many had when one was told
    to leave, None while the main thread has not heard of it. said: it has been said why the process ends."""

    code, within, over, heard, said, watched = STOPPED, 0, 0, None, False, False


def set_exit_code(code: int) -> None:
    """Has SIGTERM end this process with another exit code."""
    _Process.code = code


def exit_code() -> int:
    """Returns the exit code that a stop by SIGTERM has."""
    return _Process.code


def said() -> None:
    """Notes that the line which says why the process ends has been written."""
    _Process.said = True


def handle() -> None:
    """Has SIGTERM end this process from here on, even while modules are imported; unless it is told to pass
    over it. For the main thread."""
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _on_signal):
        return
    signal.signal(signal.SIGTERM, _on_signal)
    if not _Process.watched:
        _Process.watched = True
        read, write = os.pipe()
        os.set_blocking(write, False)
        # The signal is written there as it comes, whatever the main thread does.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=_watch, args=(read,), name="termination", daemon=True).start()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated` in the main thread, and if that does not end the process soon, it
    is ended. Where somebody else has the signal, or this is not the main thread, it does nothing."""
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or before not in (signal.SIG_DFL, _on_signal):
        yield
        return
    handle()
    _Process.within += 1
    try:
        yield
    finally:
        _Process.within -= 1
        _Process.over += 1
        signal.signal(signal.SIGTERM, before)


def _on_signal(number: int, frame) -> None:
    if _Process.within:
        _Process.heard = _Process.over
        raise Terminated
    _end()


def _end() -> None:
    if not _Process.said:
        crashes.say(SAID)
    os._exit(_Process.code)


def _forget() -> None:
    """A forked child would write its own signals to the pipe of its parent."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(descriptor: int) -> None:
    while signals := os.read(descriptor, 64):
        if signal.SIGTERM in signals and signal.getsignal(signal.SIGTERM) is _on_signal:
            time.sleep(SECONDS_TO_UNWIND)
            if _Process.said:  # it is about to end: process 0 waits for the others to hear why
                time.sleep(2 * SECONDS_TO_UNWIND)
            on = _Process.heard in (None, _Process.over)  # else that command of this process is over
            if on and signal.getsignal(signal.SIGTERM) is _on_signal:
                _end()
            another, _, _ = select.select([descriptor], [], [], 0)
            if not another:  # else what was heard may be of that one
                _Process.heard = None
