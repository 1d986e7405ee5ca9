"""A small mixture of experts on text that every machine with jaxthru has: a few minutes on two CPU cores.

As wide for each token as the dense model of `quickstart`: two experts of half its feed-forward's width, of
eight.
"""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    KernelsConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
    moe,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=200, rows=8),
        model=moe.Config(
            vocabulary=8192,
            layers=4,
            embed=192,
            heads=6,
            kv_heads=2,
            head_dim=32,
            max_sequence=1024,
            experts=8,
            top_k=2,
            expert_mlp=256,
            bias_rate=1e-3,
            aux_loss=1e-3,
        ),
        kernels=KernelsConfig(attention="xla"),  # in float32 on any device; rows this short cost it nothing
        data=DataConfig(mix="quickstart", sequence=256),
        optim=OptimConfig(learning_rate=3e-3, warmup_ratio=0.05),
        precision=PrecisionConfig(compute="float32"),  # a CPU is four times slower in bfloat16
        checkpoint=CheckpointConfig(every=50),
        evaluate=EvaluateConfig(rows=64, prompts=("The ",), temperature=0.7),
    )
