"""Hugging Face's models on packed rows, documents kept apart by torch's attention: prints one JSON line.

    PYTHONPATH=scripts/bench python -m peers.torch_documents --batches FILE.npz [--documents flex|varlen|mask]

The model's own class, with an attention of transformers' extension point: flex attention with a block mask,
varlen attention, which is FlashAttention-2 as torch has it, or a dense mask. What each needs of a batch
(block masks, bounds of documents) lies on the device beforehand and costs the step nothing.
"""

import inspect
import sys
from pathlib import Path

import harness

harness.need("torch", "transformers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peers import hugging_face, torch_step  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch has it since 2.10
    varlen_attn = None


def varlen_words() -> dict:
    """Returns how this torch's varlen attention is asked for causal, grouped attention. Its scale is that of
    these models."""
    known = inspect.signature(varlen_attn).parameters if varlen_attn else {}
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


VARLEN = varlen_words()  # beforehand: nothing is looked up in what is compiled


def by_flex(_module, query, key, value, _mask, *, scaling, documents, **_):
    query, key = query.to(value.dtype), key.to(value.dtype)  # Qwen3's norms of them are float32
    found = flex_attention(query, key, value, block_mask=documents, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2), None


def by_varlen(_module, query, key, value, _mask, *, documents, **_):
    rows, _, length, _ = query.shape
    flat = [x.to(value.dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    bounds, longest = documents
    found = varlen_attn(*flat, bounds, bounds, longest, longest, **VARLEN)
    return found.unflatten(0, (rows, length)), None


def by_mask(_module, query, key, value, _mask, *, scaling, documents, **_):
    found = F.scaled_dot_product_attention(query, key, value, documents, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2), None


ATTENTIONS = {"flex": by_flex, "varlen": by_varlen, "mask": by_mask}
for _name, _attention in ATTENTIONS.items():  # none has an entry for masks, so that the model makes none
    AttentionInterface.register(f"documents_{_name}", _attention)


def block_mask(ids: torch.Tensor) -> BlockMask:
    """Returns flex attention's mask of a batch. ids: of the document of each token, [rows, sequence]."""

    def same_document(row, _head, query, key):
        return (query >= key) & (ids[row, query] == ids[row, key])

    rows, length = ids.shape
    return create_block_mask(same_document, rows, None, length, length, device=ids.device)


def dense_mask(ids: torch.Tensor) -> torch.Tensor:
    """Returns which token sees which, [rows, 1, sequence, sequence]."""
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return same.tril()


def bounds(ids: np.ndarray) -> np.ndarray:
    """Returns where the documents of a batch begin, its rows behind each other, and where the last ends."""
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return np.append(np.flatnonzero(begins), ids.size).astype(np.int32)


def packed(path: Path, how: str) -> torch_step.Packed:
    """Returns the batches of a file by `blocks.write_batches`, with what an attention needs of them."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    ids, where = arrays["segment_ids"], torch_step.device()
    each = [bounds(batch) for batch in ids]
    longest = int(max(np.diff(of).max() for of in each))
    # All of one length, so that nothing is compiled again: what is added are documents without tokens.
    most = max(map(len, each))
    padded = [torch.from_numpy(np.pad(of, (0, most - len(of)), mode="edge")).to(where) for of in each]
    batches = []
    for number, of in enumerate(padded):
        tokens, targets = torch_step.on_device(
            *(arrays[name][number] for name in ("tokens", "targets", "loss_mask"))
        )
        on_device = torch.from_numpy(ids[number]).to(where)
        make = {"flex": block_mask, "mask": dense_mask, "varlen": lambda _, of=of: (of, longest)}[how]
        positions = torch.from_numpy(arrays["positions"][number]).long().to(where)
        batches.append((tokens, targets, {"position_ids": positions, "documents": make(on_device)}))
    span = sum(float((np.diff(of).astype(np.int64) ** 2).sum()) for of in each) / ids.size
    return torch_step.Packed(batches, span, float((ids > 0).sum() / len(ids)))


def main() -> int:
    parser = hugging_face.parser(__doc__.splitlines()[0])
    parser.add_argument("--batches", type=Path, required=True, help="an .npz of packed batches")
    parser.add_argument("--documents", choices=tuple(ATTENTIONS), default="flex")
    arguments = parser.parse_args()
    if arguments.documents == "varlen" and varlen_attn is None:
        sys.exit(f"torch_documents.py: torch {torch.__version__} has no varlen attention")
    model, loss_of = hugging_face.prepared(arguments, f"documents_{arguments.documents}")
    batches = packed(arguments.batches, arguments.documents)
    arguments.attention = "math" if arguments.documents == "mask" else arguments.attention
    line = torch_step.measure(loss_of, model, arguments, batches, **hugging_face.packages(arguments))
    harness.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
