"""What the devices can do, by their data sheets."""

import re

import jax

PEAK_BF16_FLOPS = {
    "h200 nvl": 835e12,
    "h200": 989.5e12,
    "h100 pcie": 756e12,
    "h100 nvl": 835e12,
    "h100": 989.5e12,
    "gh200": 989.5e12,
    "gb200": 2500e12,
    "b200": 2250e12,
    "a100": 312e12,
    "l40s": 362e12,
    "mi300x": 1307.4e12,
    "mi325x": 1307.4e12,
    "tpu v4": 275e12,
    "tpu v5 lite": 197e12,
    "tpu v5e": 197e12,
    "tpu v5p": 459e12,
    "tpu v5": 459e12,
    "tpu v6 lite": 918e12,
    "tpu v6e": 918e12,
    "tpu7x": 2307e12,
}
"""Whole words of a device kind's name, lower case -> dense bf16 FLOP/s; the first that fits counts."""


def data_sheet_flops(kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of one device of this kind, None where the data sheet is not known."""
    named = (peak for words, peak in PEAK_BF16_FLOPS.items() if re.search(rf"\b{words}\b", kind.lower()))
    return next(named, None)


def peak_flops(devices: list[jax.Device]) -> float | None:
    """Returns the dense bf16 FLOP/s of all devices together, None where a data sheet is not known."""
    peaks = [data_sheet_flops(device.device_kind) for device in devices]
    return None if None in peaks else sum(peaks)


def peak_bytes() -> int | None:
    """Returns the most bytes in use at once on this process's fullest device, None where not counted."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    return max(peaks, default=None)
