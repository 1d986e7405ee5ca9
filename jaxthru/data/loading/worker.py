"""A token worker: a process that tokenises text during training, for `online` sources.

    python -m jaxthru.data.loading.worker SOCKET MEMORY TOKENIZER BORDERS

It is started by `token_workers.py`, which sends it [task, folder, split, transform, count, place] through the
socket, as JSON, which runs nothing; the worker reads `count` chunks from the shared memory at `place`,
writes their tokens there and answers [task, seconds, error]. The transform is what the mix says, whatever the
store does. It holds no state but what it has opened: a task may be given to another worker at any time.
It ends when the socket is closed, so that no worker outlives the process that it works for; SIGINT and
SIGTERM, which it is started without, do not end it.
"""

import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from jaxthru.data.sources.transforms import Transform, apply, find_transform
from jaxthru.data.store.chunks import StoredText, signed
from jaxthru.data.store.text_store import TextSplit, TextStore
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.data.store.tokenizer_folder import Borders
from jaxthru.runtime.errors import InputError

SAME = "a transform must give the same result for the same text"


class Stores:
    """The stores that this worker has opened, each of which holds little: what counts documents is mapped."""

    def __init__(self):
        self._opened: dict[str, TextStore] = {}

    def split(self, folder: str, split: str) -> TextSplit:
        """Returns a split of a store."""
        if folder not in self._opened:
            self._opened[folder] = TextStore(Path(folder))
        return getattr(self._opened[folder], split)


def produce(
    stores: Stores,
    tokenizer: Tokenizer,
    folder: str,
    split: str,
    transform: Transform,
    chunks: np.ndarray,
) -> np.ndarray:
    """Returns the tokens of the chunks, one after the other, int32: ~token where it is no target that is
    trained on. Raises InputError."""
    opened, function = stores.split(folder, split), find_transform(transform)
    stored, given, tokens = opened.texts(chunks), [], []
    for chunk, (text, _, _) in zip(chunks.tolist(), stored, strict=True):
        try:
            # What says which of it is trained on was transformed before it was put together.
            given.append(text if text.marked else StoredText(apply(function, text.text)))
        except InputError as error:
            where = f"{folder}: chunk {chunk} of {split}"
            raise InputError(f"{where}: {error}, and did not when the store was made: {SAME}") from error
    for (_, begins, final), encoded in zip(stored, tokenizer.encode_documents(given), strict=True):
        tokens.append(tokenizer.part(signed(*encoded), begins, final))
    lengths = opened.lengths(chunks).tolist()
    for chunk, ids, length in zip(chunks.tolist(), tokens, lengths, strict=True):
        if len(ids) != length:
            where = f"{folder}: chunk {chunk} of {split}"
            were = f"is {len(ids)} tokens long, and was {length} when the store was made"
            raise InputError(f"{where} {were}: {SAME}")
    return np.concatenate(tokens)


class TokenMaker:
    """Does tasks: what a token worker is, wherever it runs. tokenizer: the path of its tokenizer.json.
    borders: the values of a `Borders`. Raises InputError for a tokenizer that cannot be opened."""

    def __init__(self, tokenizer: str, borders: Sequence):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
        self._stores, self._tokenizer = Stores(), Tokenizer(Path(tokenizer), Borders(*borders))

    def make(
        self, folder: str, split: str, transform: Sequence[str], chunks: np.ndarray
    ) -> tuple[float, np.ndarray, str | None]:
        """Returns (the seconds that it took, the tokens of the chunks as `produce` does, what went wrong)."""
        began = time.perf_counter()
        try:
            tokens = produce(self._stores, self._tokenizer, folder, split, Transform(*transform), chunks)
            return time.perf_counter() - began, tokens, None
        except Exception as failure:  # whatever it is, the process that asked is to hear of it
            known = isinstance(failure, InputError)
            error = str(failure) if known else f"{folder}: {type(failure).__name__}: {failure}"
            return time.perf_counter() - began, np.zeros(0, np.int32), error


def wait_for_end(socket: Connection) -> None:
    """Waits until the other end of the socket closes."""
    poll = select.poll()
    poll.register(socket.fileno(), 0)  # which leaves the hang-up
    poll.poll()


def end_with(socket: Connection) -> None:
    """Ends this process when the other end of the socket closes, even if a text or a transform hangs it."""
    wait_for_end(socket)
    os._exit(0)


def outlast_signals() -> None:
    """Lets this process pass over what asks the whole run for a stop (`worker_handle.blocked`), but not what
    it starts itself: a transform may have processes of its own, and end them so."""
    asked = signal.SIGINT, signal.SIGTERM
    for number in asked:
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited by programs
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in asked])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)


def main(argv: list[str]) -> int:
    """Serves tasks until the socket closes."""
    outlast_signals()
    socket, memory = Connection(int(argv[0])), mmap.mmap(int(argv[1]), 0)
    threading.Thread(target=end_with, args=(socket,), daemon=True).start()
    os.close(int(argv[1]))
    maker = TokenMaker(argv[2], json.loads(argv[3]))
    place = np.frombuffer(memory, np.int32)
    while True:
        try:
            task, folder, split, transform, count, first = json.loads(socket.recv_bytes())
        except (EOFError, OSError):  # an OSError, where answers were left unread
            return 0
        chunks = place[first : first + 2 * count].view(np.int64).copy()  # the tokens take their place
        seconds, tokens, error = maker.make(folder, split, transform, chunks)
        place[first : first + len(tokens)] = tokens
        try:
            socket.send_bytes(json.dumps([task, seconds, error]).encode())
        except OSError:
            return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"token worker: {error}")
