"""Mixtral 8x7B (arXiv:2401.04088): eight large experts a layer, two for each token; for several hosts."""

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
        train=TrainConfig(steps=10_000, rows=64),
        model=moe.Config(
            vocabulary=32_000,
            layers=32,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            max_sequence=32_768,
            rope_theta=1_000_000.0,
            experts=8,
            top_k=2,
            expert_mlp=14_336,
            score="softmax_of_chosen",
            aux_loss=0.02,
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4),
        mesh=MeshConfig(expert=2),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
