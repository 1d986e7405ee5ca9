"""Mistral 7B v0.3 (arXiv:2310.06825); this version has no sliding window."""

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
        train=TrainConfig(steps=10_000, rows=8),
        model=ModelConfig(
            vocabulary=32_768,
            layers=32,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            max_sequence=32_768,
            rope_theta=1000000.0,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
