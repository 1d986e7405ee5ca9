"""Named shapes of attention, which drive its tests and its benchmarks alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One call; `layout` says how documents fill the rows, see `pallas_kernels.testing.segment_ids`, and
    `window` how many tokens each sees of its own, None being all."""

    rows: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    layout: str
    max_segments: int
    window: int | None = None


# Small enough for a CPU. "two_chunks" and what follows it are longer than one chunk of the portable
# implementation; windows are 1, within a chunk, across chunks, wider than documents, and wider than the row.
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
    "window_1": Shape(2, 64, 4, 2, 16, "documents", 12, 1),
    "window_5": Shape(3, 77, 4, 2, 16, "padding_tail", 8, 5),
    "window_in_mixed_rows": Shape(5, 64, 4, 2, 16, "mixed", 64, 17),
    "window_above_documents": Shape(2, 96, 4, 2, 16, "tiny_documents", 96, 50),
    "window_above_row": Shape(2, 64, 4, 2, 16, "documents", 12, 64),
    "window_1_of_chunks": Shape(1, 1100, 2, 1, 8, "padding_tail", 8, 1),
    "window_in_chunk": Shape(1, 1536, 2, 1, 8, "documents", 12, 100),
    "window_across_chunks": Shape(1, 1700, 2, 1, 8, "one_document", 1, 700),
    "window_of_all_but_one": Shape(1, 1025, 2, 1, 8, "one_document", 1, 1024),
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
    "window_1": Shape(2, 1024, 8, 2, 128, "documents", 32, 1),
    "window_100": Shape(5, 1000, 8, 2, 64, "mixed", 1000, 100),
    "window_100_causal": Shape(2, 1024, 8, 2, 128, "one_document", 1, 100),
    "window_above_documents": Shape(2, 1024, 8, 2, 64, "tiny_documents", 1024, 500),
    "wide_heads": Shape(2, 1024, 4, 2, 256, "padding_tail", 8),
    "wide_heads_window": Shape(5, 1000, 4, 1, 256, "mixed", 1000, 300),
    "window_512": Shape(2, 8192, 8, 2, 128, "documents", 32, 512),
    "gemma3_270m_local": Shape(2, 8192, 4, 1, 256, "documents", 32, 512),
    "gemma3_local": Shape(2, 8192, 8, 4, 256, "documents", 32, 1024),
    "mistral": Shape(2, 8192, 32, 8, 128, "documents", 32, 4096),
    "mistral_causal": Shape(2, 8192, 32, 8, 128, "one_document", 1, 4096),
}
