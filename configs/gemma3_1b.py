"""Gemma 3 1B (arXiv:2503.19786), text."""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    gemma,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=10_000, rows=16),
        model=gemma.Config(
            vocabulary=262_144,
            layers=26,
            embed=1152,
            heads=4,
            kv_heads=1,
            head_dim=256,
            mlp=6912,
            max_sequence=32_768,
            window=512,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
