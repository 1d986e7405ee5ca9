"""Qwen3 8B (arXiv:2505.09388): norms on queries and keys."""

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
            vocabulary=151_936,
            layers=36,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=12_288,
            max_sequence=40_960,
            rope_theta=1000000.0,
            norm_epsilon=1e-06,
            qk_norm=True,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
