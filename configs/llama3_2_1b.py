"""Llama 3.2 1B: tied embeddings, rotary frequencies scaled by 32."""

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
        train=TrainConfig(steps=10_000, rows=16),
        model=ModelConfig(
            vocabulary=128_256,
            layers=16,
            embed=2048,
            heads=32,
            kv_heads=8,
            head_dim=64,
            mlp=8192,
            max_sequence=131_072,
            rope_scaling=RopeScaling(factor=32.0),
            tied_embeddings=True,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
