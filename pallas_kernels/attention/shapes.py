"""Named shapes of attention, which drive its tests and its benchmarks alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call; `layout` says how documents fill the rows, see `pallas_kernels.testing.segment_ids`."""

    rows: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str
    max_segments: int


# Small enough for a CPU. The last two are longer than one chunk of the portable implementation.
CPU = {
    "one_document": Shape(2, 64, 4, 2, 16, "one_document", 1),
    "multi_head": Shape(2, 48, 3, 3, 8, "documents", 12),
    "multi_query": Shape(2, 64, 4, 1, 32, "documents", 16),
    "tiny_documents": Shape(3, 96, 4, 2, 16, "tiny_documents", 96),
    "padding_tail": Shape(3, 80, 4, 2, 16, "padding_tail", 8),
    "mixed_rows": Shape(5, 64, 4, 2, 16, "mixed", 64),
    "odd_length": Shape(2, 77, 2, 1, 24, "padding_tail", 8),
    "two_chunks": Shape(1, 1024, 2, 1, 16, "documents", 12),
    "cut_chunk": Shape(2, 700, 2, 1, 8, "padding_tail", 8),
}

# What a GPU kernel must do. "llama3_8b" is the benchmarks' shape: up to 12 documents in 8,192 tokens.
GPU = {
    "one_document": Shape(2, 1024, 8, 2, 128, "one_document", 1),
    "room_to_spare": Shape(2, 1024, 8, 2, 128, "one_document", 32),
    "multi_head": Shape(2, 512, 4, 4, 64, "documents", 32),
    "tiny_documents": Shape(2, 1024, 8, 2, 64, "tiny_documents", 1024),
    "mixed_rows": Shape(5, 1000, 8, 2, 128, "mixed", 1000),
    "llama3_8b": Shape(2, 8192, 32, 8, 128, "documents", 32),
    "llama3_8b_causal": Shape(2, 8192, 32, 8, 128, "one_document", 1),
}
