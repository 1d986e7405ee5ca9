"""AdamW's moments in 8 bits an entry, in blocks that share a scale."""

from pallas_kernels.adamw_8bit.reference import Quantised, block_length, dequantise, quantise

__all__ = ["Quantised", "block_length", "dequantise", "quantise"]
