"""OLMoE 1B-7B (arXiv:2409.02060): 64 small experts a layer, 8 for each token; whole on one GPU of 141 GB."""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    moe,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=10_000, rows=8),
        model=moe.Config(
            vocabulary=50_304,
            layers=16,
            embed=2048,
            heads=16,
            kv_heads=16,
            head_dim=128,
            max_sequence=4096,
            rope_theta=10_000.0,
            qk_norm=True,
            qk_norm_together=True,
            experts=64,
            top_k=8,
            expert_mlp=1024,
            normalise=False,
            aux_loss=0.01,
            router_z_loss=0.001,
        ),
        data=DataConfig(mix="quickstart", sequence=4096),
        optim=OptimConfig(learning_rate=4e-4),
        checkpoint=CheckpointConfig(every=1000, keep=1),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
