"""Llama 3.1 70B (arXiv:2407.21783), for a pod."""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimConfig,
    RopeScaling,
    RunConfig,
    TrainConfig,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=10_000, rows=64),
        model=ModelConfig(
            vocabulary=128_256,
            layers=80,
            embed=8192,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp=28_672,
            max_sequence=131_072,
            rope_scaling=RopeScaling(),
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
