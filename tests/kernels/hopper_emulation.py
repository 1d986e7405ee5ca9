"""The kernels for Hopper on a CPU, for several shards, one after another.

JAX's interpreter of GPU kernels runs one device and knows neither semaphores nor peers' memory. So each shard
runs several times. What it stores in a peer's buffer goes to a mailbox. In the next run, its buffers hold
what it has written to them itself and what the mailboxes of all shards have for it. The result of a scatter
is the sum of what it adds to it and of what the mailboxes have. A tile of a scatter can be sent in the second
run, and read where it was staged in the third. Signals are counted, and so is what each wait expects. This
shows that each tile is made of the right rows, sent to the right place of the right peer, and announced as
often as it is waited for; not what happens at the same time.
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
        self.scatters = self.stages = self.adds = False  # of the kernel that runs
        self.interpret = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
        self._added_to = ()  # the ids of what is added to, not written
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
        for _ in range(2 if self.stages else 1):
            received = [self._received(rank) for rank in range(self.t)]
            results = run_all(received)
        if self.scatters:
            results = [(self._sum(rank, outs[0]), None) for rank, outs in enumerate(results)]
        # A buffer for gathered rows is the last one; it now holds what all shards wrote to it.
        return [(outs[0], buffers[-1]) for outs, buffers in zip(results, received, strict=True)]

    def _received(self, rank: int) -> list[jax.Array]:
        """Returns each buffer of a shard as its peers and it have filled it; NaN is unwritten."""
        buffers = []
        for i, own in enumerate(self.own[rank], start=self.scatters):
            whole = np.array(own.astype(jnp.float32))
            for mail in self.mail:
                sent = np.array(mail[i][rank].astype(jnp.float32))
                assert not (~np.isnan(sent) & ~np.isnan(whole)).any(), "written twice"
                whole = np.where(np.isnan(sent), whole, sent)
            buffers.append(jnp.asarray(whole).astype(own.dtype))
        return buffers

    def _sum(self, rank: int, own) -> jax.Array:
        """Returns a shard's result of a scatter: what it adds, and each that writes or adds to it."""
        before = (rank - 1) % self.t
        total = own
        for source, (result_mail, *_) in enumerate(self.mail):
            if source == before or (self.adds and source != rank):
                total += result_mail[rank]
            else:
                assert np.isnan(result_mail[rank].astype(jnp.float32)).all(), "not this shard's to write"
        assert not np.isnan(total.astype(jnp.float32)).any(), "a shard has not added to all of it"
        return total

    def _kernel(self, body, out_type, tiles, ctas, dtype, transposed, sends, adds=False):
        arguments = tiles, ctas, dtype, transposed, sends
        if self.t == 1:
            return self._real_kernel(body, out_type, *arguments)
        planes = [i for i, o in enumerate(out_type) if len(o.shape) == 3]
        self.scatters, self.stages, self.adds = bool(planes), len(planes) == 2, adds
        buffers = sorted({*planes, len(out_type) - 1})
        remote = [0] * self.scatters + buffers
        mail = [jax.ShapeDtypeStruct((self.t, *out_type[i].shape), dtype) for i in remote]
        scratch = 5 + 2 * sends
        prefilled = self.prefilled

        def with_mail(*refs):
            refs, scratch_refs = list(refs[:-scratch]), refs[-scratch:]
            mail_refs = [refs.pop() for _ in mail][::-1]
            out_refs = [refs.pop() for _ in out_type][::-1]
            if prefilled is not None:
                filled = [refs.pop() for _ in buffers][::-1]
                for i, ref in zip(buffers, filled, strict=True):
                    out_refs[i] = ref
            self._mailboxes = {id(out_refs[i]): m for i, m in zip(remote, mail_refs, strict=True)}
            self._added_to = {id(ref) for ref in (out_refs[:1] + mail_refs[:adds]) if self.scatters}
            self._semaphores = 0
            body(*refs, *out_refs, *scratch_refs)

        def call(*operands):
            kernel = self._real_kernel(with_mail, [*out_type, *mail], *arguments)
            outs = kernel(*operands, *(prefilled or []))
            if prefilled is None:
                self.own.append([outs[i] for i in buffers])
            self.mail.append(outs[len(out_type) :])
            return outs[: len(out_type)]

        return call

    def _store(self, copy, source, to, reduction_op=None):
        assert reduction_op == ("add" if id(to.ref) in self._added_to else None)
        if reduction_op is None:
            copy(source, to)
        else:  # what nobody has added to is NaN
            before, more = to[...], source[...]
            to[...] = jnp.where(jnp.isnan(before), more, before + more)

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
