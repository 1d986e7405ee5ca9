"""The batch: the contract between the data plane and the training step."""

from collections.abc import Collection

import numpy as np

BATCH_FIELDS: dict[str, np.dtype] = {
    "tokens": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "segment_ids": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.float32),
    "source": np.dtype(np.int32),
}
"""Each field is `[rows, sequence]`.

tokens: inputs. targets: the token that follows within the same document; 0 where there is none.
segment_ids: 0 is padding; documents count from 1 in each row. positions: count from 0 in each segment.
loss_mask: 1.0 where `targets` counts. source: index into the mix's sources.
"""


def check_batch(
    batch: dict[str, np.ndarray], rows: int, sequence: int, columns: Collection[str] = ()
) -> None:
    """Raises ValueError unless `batch` has exactly the contract's fields, shapes and dtypes. columns: what it
    has to bring along beside them, see `BatchBuilder.add_column`."""
    if batch.keys() != {*BATCH_FIELDS, *columns}:
        raise ValueError(f"batch has fields {sorted(batch)}, expected {sorted((*BATCH_FIELDS, *columns))}")
    for name, dtype in BATCH_FIELDS.items():
        array = batch[name]
        if array.shape != (rows, sequence) or array.dtype != dtype:
            raise ValueError(
                f"batch[{name!r}] is {array.dtype}{list(array.shape)}, expected {dtype}[{rows}, {sequence}]"
            )
