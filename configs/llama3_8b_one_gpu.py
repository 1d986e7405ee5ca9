"""All 32 layers of Llama 3 8B on one GPU of 141 GB: 90 GiB of float32 state, and every byte else counted.

The layers' gradients are bfloat16 (13 GiB), those of the embedding and the LM head float32 (4 GiB). `auto`
takes `gate`, 1.0 GiB of activations a layer, with nothing on the host. Attention is Triton's, which needs no
workspace for packed rows.
"""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    KernelsConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=1000, rows=2),
        model=ModelConfig(
            vocabulary=128_256,
            layers=32,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            max_sequence=8192,
        ),
        kernels=KernelsConfig(attention="triton"),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=500, keep=1),
        evaluate=EvaluateConfig(rows=8),
    )
