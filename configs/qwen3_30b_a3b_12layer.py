"""The shape of Qwen3 30B-A3B cut to 12 layers: what one GPU of 141 GB trains with all state on the device."""

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
        train=TrainConfig(steps=1000, rows=8),
        model=moe.Config(
            vocabulary=151_936,
            layers=12,
            embed=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            max_sequence=40_960,
            rope_theta=1_000_000.0,
            norm_epsilon=1e-6,
            qk_norm=True,
            experts=128,
            top_k=8,
            expert_mlp=768,
            aux_loss=0.001,
        ),
        data=DataConfig(mix="quickstart", sequence=4096),
        optim=OptimConfig(learning_rate=3e-4, state="split_master"),
        checkpoint=CheckpointConfig(every=500, keep=1),
        evaluate=EvaluateConfig(rows=8),
    )
