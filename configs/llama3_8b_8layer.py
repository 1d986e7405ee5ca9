"""The shape of Llama 3 8B cut to 8 layers: what one GPU trains with all of its state on the device."""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
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
            layers=8,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            max_sequence=8192,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=500, keep=1),
        evaluate=EvaluateConfig(rows=8),
    )
