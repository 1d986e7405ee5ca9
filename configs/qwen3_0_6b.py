"""Qwen3 0.6B (arXiv:2505.09388): tied embeddings, norms on queries and keys."""

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
        train=TrainConfig(steps=10_000, rows=16),
        model=ModelConfig(
            vocabulary=151_936,
            layers=28,
            embed=1024,
            heads=16,
            kv_heads=8,
            head_dim=128,
            mlp=3072,
            max_sequence=40_960,
            rope_theta=1000000.0,
            norm_epsilon=1e-06,
            tied_embeddings=True,
            qk_norm=True,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
