"""Qwen3 235B-A22B (arXiv:2505.09388), 128 experts a layer split over the eight GPUs of a host; for a pod."""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    MeshConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    moe,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=10_000, rows=256),
        model=moe.Config(
            vocabulary=151_936,
            layers=94,
            embed=4096,
            heads=64,
            kv_heads=4,
            head_dim=128,
            max_sequence=40_960,
            rope_theta=1_000_000.0,
            norm_epsilon=1e-6,
            qk_norm=True,
            experts=128,
            top_k=8,
            expert_mlp=1536,
            aux_loss=0.001,
        ),
        data=DataConfig(mix="quickstart", sequence=4096),
        optim=OptimConfig(learning_rate=3e-4),
        mesh=MeshConfig(expert=8),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
