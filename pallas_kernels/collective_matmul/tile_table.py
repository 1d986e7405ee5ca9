"""Measured tiles of the kernels for Hopper; written by scripts/bench/tune_collective_matmul.py, not by hand.

{device kind: {key of a tiles.Problem: {"tiles": the fields of a tiles.Tiles, "microseconds": of a call with
the kernel, without a pause and in bursts, "plain_microseconds": of the plain form in the same run, "faster":
whether the kernel is in both}}}
"""

TABLE: dict[str, dict[str, dict]] = {
    "NVIDIA H200": {
        "gather/2/4096x4096x3072/bfloat16": {
            "tiles": {"m": 128, "n": 192, "stages": 4, "minor": "M", "width": 4, "cluster": 1, "senders": 44},
            "microseconds": 319.3,
            "plain_microseconds": 475.6,
            "faster": True,
        },
        "gather/2/4096x4096x7168/bfloat16": {
            "tiles": {
                "m": 128,
                "n": 256,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 2,
                "senders": 44,
            },
            "microseconds": 765.5,
            "plain_microseconds": 917.4,
            "faster": True,
        },
        "gather/2/8192x4096x14336/bfloat16": {
            "tiles": {"m": 128, "n": 256, "stages": 4, "minor": "N", "width": 8, "cluster": 2, "senders": 44},
            "microseconds": 2984.6,
            "plain_microseconds": 3157.1,
            "faster": True,
        },
        "gather/2/8192x4096x2048+512+512/bfloat16": {
            "tiles": {"m": 128, "n": 256, "stages": 4, "minor": "N", "width": 8, "cluster": 1, "senders": 44},
            "microseconds": 647.9,
            "plain_microseconds": 1071.5,
            "faster": True,
        },
        "gather/2/8192x4096x7168+7168/bfloat16": {
            "tiles": {
                "m": 128,
                "n": 256,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 2,
                "senders": 44,
            },
            "microseconds": 2984.9,
            "plain_microseconds": 3160.2,
            "faster": True,
        },
        "gather_transposed/2/4096x4096x3072/bfloat16": {
            "tiles": {
                "m": 128,
                "n": 256,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 1,
                "senders": 44,
            },
            "microseconds": 637.3,
            "plain_microseconds": 820.2,
            "faster": True,
        },
        "gather_transposed/2/4096x4096x7168/bfloat16": {
            "tiles": {
                "m": 128,
                "n": 256,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 1,
                "senders": 44,
            },
            "microseconds": 1501.9,
            "plain_microseconds": 1627.2,
            "faster": True,
        },
        "gather_transposed/2/8192x4096x2048/bfloat16": {
            "tiles": {
                "m": 128,
                "n": 256,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 1,
                "senders": 44,
            },
            "microseconds": 842.1,
            "plain_microseconds": 1188.1,
            "faster": True,
        },
        "gather_transposed/2/8192x4096x7168/bfloat16": {
            "tiles": {"m": 256, "n": 128, "stages": 4, "minor": "M", "width": 4, "cluster": 1, "senders": 44},
            "microseconds": 2994.3,
            "plain_microseconds": 3144.9,
            "faster": True,
        },
        "scatter/2/4096x3072x4096/bfloat16": {
            "tiles": {
                "m": 256,
                "n": 128,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 1,
                "senders": 44,
            },
            "microseconds": 354.2,
            "plain_microseconds": 502.8,
            "faster": True,
        },
        "scatter/2/4096x7168x4096/bfloat16": {
            "tiles": {"m": 256, "n": 128, "stages": 4, "minor": "N", "width": 8, "cluster": 1, "senders": 44},
            "microseconds": 780.5,
            "plain_microseconds": 903.5,
            "faster": True,
        },
        "scatter/2/8192x2048x4096/bfloat16": {
            "tiles": {"m": 128, "n": 256, "stages": 4, "minor": "M", "width": 8, "cluster": 1, "senders": 44},
            "microseconds": 487.1,
            "plain_microseconds": 746.3,
            "faster": True,
        },
        "scatter/2/8192x7168x4096/bfloat16": {
            "tiles": {"m": 128, "n": 256, "stages": 4, "minor": "M", "width": 4, "cluster": 2, "senders": 44},
            "microseconds": 1516.8,
            "plain_microseconds": 1920.6,
            "faster": True,
        },
        "scatter_transposed+4096/2/4096x3072x4096/bfloat16": {
            "tiles": {"m": 256, "n": 128, "stages": 4, "minor": "N", "width": 8, "cluster": 1, "senders": 44},
            "microseconds": 681.3,
            "plain_microseconds": 860.6,
            "faster": True,
        },
        "scatter_transposed+4096/2/4096x7168x4096/bfloat16": {
            "tiles": {"m": 256, "n": 128, "stages": 4, "minor": "N", "width": 8, "cluster": 1, "senders": 44},
            "microseconds": 1504.4,
            "plain_microseconds": 1667.5,
            "faster": True,
        },
        "scatter_transposed+4096/2/8192x14336x4096/bfloat16": {
            "tiles": {
                "m": 256,
                "n": 128,
                "stages": 4,
                "minor": "M",
                "width": 16,
                "cluster": 1,
                "senders": 44,
            },
            "microseconds": 5997.5,
            "plain_microseconds": 6370.6,
            "faster": True,
        },
        "scatter_transposed+4096/2/8192x2048+512+512x4096/bfloat16": {
            "tiles": {"m": 256, "n": 128, "stages": 4, "minor": "N", "width": 8, "cluster": 1, "senders": 44},
            "microseconds": 1379.4,
            "plain_microseconds": 2041.3,
            "faster": True,
        },
        "scatter_transposed+4096/2/8192x7168+7168x4096/bfloat16": {
            "tiles": {"m": 256, "n": 128, "stages": 4, "minor": "M", "width": 8, "cluster": 2, "senders": 44},
            "microseconds": 5958.4,
            "plain_microseconds": 6233.9,
            "faster": True,
        },
    },
}
