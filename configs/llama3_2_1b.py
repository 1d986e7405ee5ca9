"""Llama 3.2 1B: tied embeddings, rotary frequencies scaled by 32."""

from jaxthru.config import RunConfig
from jaxthru.data.loader import DataConfig
from jaxthru.engine.step import TrainConfig
from jaxthru.models.llama import ModelConfig, RopeScaling
from jaxthru.models.remat import RematConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig


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
        remat=RematConfig(policy="projections"),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
