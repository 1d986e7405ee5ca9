"""The kernels for Hopper on a CPU, for several shards, one after another.

JAX's interpreter of GPU kernels runs one device and knows neither semaphores nor peers' memory. So each shard
runs several times. What it stores in a peer's buffer goes to a mailbox. In the next run, its buffers hold
what it has written to them itself and what the mailboxes of all shards have for it; a result that shards add
to is the sum of those. A tile of a scatter can be sent in the second run, and added up in the third. Signals
are counted, and so is what each wait expects. This shows that each tile is made of the right rows, sent to
the right place of the right peer, and announced as often as it is waited for; not what happens at the same
time.
"""

import collections
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul import hopper

AXIS = "tensor"


class Shards:
    """Takes the place of peers, semaphores and the axis in `hopper`, until monkeypatch takes it back."""

    def __init__(self, monkeypatch, t: int, detect_races: bool = False):
        self.t, self.rank = t, None
        self.prefilled, self.mail, self.own = None, [], []
        self.interpret = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
        self.adds, self._added_to = (
            False,
            (),
        )  # the ids of the result that shards add to, and of its mailboxes
        self.signals = collections.Counter()  # {(shard, semaphores, index): signalled}
        self.sources = collections.defaultdict(set)  # who did
        self.waits = {}  # {(shard, semaphores, index): expected}
        self._real_kernel, self._semaphores, self._lock = hopper._kernel, 0, threading.Lock()
        axis_index, axis_size = jax.lax.axis_index, jax.lax.axis_size
        for where, name, stand_in in (
            (jax.lax, "axis_index", lambda name: jnp.int32(self.rank) if name == AXIS else axis_index(name)),
            (jax.lax, "axis_size", lambda name: t if name == AXIS else axis_size(name)),
            (plgpu, "warp_map", lambda act: [act(jnp.int32(warp)) for warp in range(2)] and None),
            # Each thread block of a cluster loads for itself what one of them loads for all.
            (plgpu, "copy_gmem_to_smem", functools.partial(_for_itself, plgpu.copy_gmem_to_smem)),
            (plgpu, "copy_smem_to_gmem", functools.partial(self._store, plgpu.copy_smem_to_gmem)),
            (plgpu, "remote_ref", lambda ref, device_id: self._mailboxes[id(ref)].at[device_id[AXIS]]),
            (pl, "get_global", self._get_global),
            (pl, "semaphore_signal", self._signal),
            (hopper, "_wait", self._wait),
            (hopper, "_kernel", self._kernel),
        ):
            monkeypatch.setattr(where, name, stand_in)

    def run(self, kernel, arguments_of, **options) -> list:
        """Returns kernel(*arguments_of(rank), axis_name=..., **options) of each shard."""
        with plgpu.force_gpu_interpret_mode(self.interpret):
            return self._run(kernel, arguments_of, **options)

    def _run(self, kernel, arguments_of, **options) -> list:
        def run_all(received):
            self.mail, results = [], []
            for self.rank, self.prefilled in enumerate(received):
                results.append(kernel(*arguments_of(self.rank), axis_name=AXIS, **options))
            return results

        results = run_all([None] * self.t)
        if self.t == 1:
            return results
        jax.effects_barrier()
        assert self.signals and self.signals == self.waits
        received = [self._received(rank) for rank in range(self.t)]
        if kernel is not hopper.gather_matmul:
            run_all(received)
            received = [self._received(rank) for rank in range(self.t)]
        if self.adds:  # no shard reads what another has added
            sums = np.stack([buffers[0].astype(jnp.float32) for buffers in received])
            assert not np.isnan(sums).any(), "a shard has not added to all of it"
            return [(buffers[0], buffers[-1]) for buffers in received]
        # A buffer for gathered rows is the last result; it now holds what all shards wrote to it.
        return [(outs[0], buffers[-1]) for outs, buffers in zip(run_all(received), received, strict=True)]

    def _received(self, rank: int) -> list[jax.Array]:
        """Returns each remote buffer of a shard as its peers and it have filled it; NaN is unwritten."""
        buffers = []
        for i, own in enumerate(self.own[rank]):
            whole = np.array(own.astype(jnp.float32))
            all_sent = [np.array(mail[i][rank].astype(jnp.float32)) for mail in self.mail]
            if self.adds and i == 0:
                buffers.append(_sum([whole, *(all_sent[k] for k in range(self.t) if k != rank)], own.dtype))
                continue
            for sent in all_sent:
                assert not (~np.isnan(sent) & ~np.isnan(whole)).any(), "written twice"
                whole = np.where(np.isnan(sent), whole, sent)
            buffers.append(jnp.asarray(whole).astype(own.dtype))
        return buffers

    def _kernel(self, body, out_type, tiles, ctas, dtype, transposed, sends, adds=False):
        arguments = tiles, ctas, dtype, transposed, sends
        self.adds = adds
        if self.t == 1:
            return self._real_kernel(body, out_type, *arguments)
        last = len(out_type) - 1
        remote = [i for i, o in enumerate(out_type) if i == last or len(o.shape) == 3 or adds]
        mail = [jax.ShapeDtypeStruct((self.t, *out_type[i].shape), dtype) for i in remote]
        scratch = 5 + 2 * sends
        prefilled = self.prefilled

        def with_mail(*refs):
            refs, scratch_refs = list(refs[:-scratch]), refs[-scratch:]
            mail_refs = [refs.pop() for _ in mail][::-1]
            out_refs = [refs.pop() for _ in out_type][::-1]
            if prefilled is not None:
                filled = [refs.pop() for _ in remote][::-1]
                for i, ref in zip(remote, filled, strict=True):
                    out_refs[i] = ref
            self._mailboxes = {id(out_refs[i]): m for i, m in zip(remote, mail_refs, strict=True)}
            self._added_to = {id(out_refs[0]), id(mail_refs[0])} if adds else ()
            self._semaphores = 0
            body(*refs, *out_refs, *scratch_refs)

        def call(*operands):
            kernel = self._real_kernel(with_mail, [*out_type, *mail], *arguments)
            outs = kernel(*operands, *(prefilled or []))
            if prefilled is None:
                self.own.append([outs[i] for i in remote])
            self.mail.append(outs[len(out_type) :])
            return outs[: len(out_type)]

        return call

    def _store(self, copy, source, to, reduction_op=None):
        assert reduction_op == ("add" if id(to.ref) in self._added_to else None)
        copy(source, to)

    def _get_global(self, semaphores):
        self._semaphores += 1
        return _Semaphore(self._semaphores, semaphores.shape[0])

    def _signal(self, semaphore, device_id=None):
        if self.prefilled is None:  # each consumer's signal of a tile comes twice, as there are two of them
            count = functools.partial(self._count, self.rank, semaphore)
            to = device_id[AXIS] if device_id else self.rank
            jax.debug.callback(count, to, semaphore.index)

    def _count(self, source, semaphore, shard, index):
        with self._lock:
            key = int(shard), semaphore.array, semaphore.checked(index)
            self.signals[key] += 1
            self.sources[key].add(source)

    def _wait(self, semaphore, value):
        if self.prefilled is None:
            jax.debug.callback(functools.partial(self._expect, self.rank, semaphore, value), semaphore.index)

    def _expect(self, shard, semaphore, value, index):
        with self._lock:
            key = shard, semaphore.array, semaphore.checked(index)
            assert self.waits.setdefault(key, value) == value


def _sum(addends, dtype) -> jax.Array:
    """Returns zeros with each added to them, rounded every time."""
    return functools.reduce(
        lambda total, x: total + jnp.asarray(x).astype(dtype), addends, jnp.zeros((), dtype)
    )


def _for_itself(copy, *arguments, collective_axes=None):
    copy(*arguments)


class _Semaphore:
    """One of the arrays of semaphores of a kernel, and which of it."""

    def __init__(self, array: int, size: int, index=None):
        self.array, self.size, self.index = array, size, index

    @property
    def at(self):
        return self

    def checked(self, index) -> int:
        """Returns the index as a number, which nothing else would hold within the array."""
        assert 0 <= index < self.size
        return int(index)

    def __getitem__(self, index):
        return _Semaphore(self.array, self.size, index)
