"""Qwen3 30B-A3B (arXiv:2505.09388) whole on one GPU of 141 GB, with two thirds of its optimizer on the host.

171 GiB of state: bfloat16 weights, the 16 bits that make them exact float32, and moments of 8 bits. A step is
of 64k tokens, in four micro-batches that each layer takes one after the other: its state comes and goes once
for all of them, which is what hides the copies.
"""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    KernelsConfig,
    OffloadConfig,
    OptimConfig,
    RematConfig,
    RunConfig,
    TrainConfig,
    moe,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=1000, rows=16, microbatches=4),
        model=moe.Config(
            vocabulary=151_936,
            layers=48,
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
            loop="unroll",
        ),
        kernels=KernelsConfig(attention="triton"),
        data=DataConfig(mix="quickstart", sequence=4096),
        optim=OptimConfig(learning_rate=3e-4, state="split_master_int8", clip_rule="previous"),
        remat=RematConfig(policy="full"),
        offload=OffloadConfig(level="optimizer", fraction=0.65, host_gib=112.0),
        checkpoint=CheckpointConfig(every=500, keep=1),
        evaluate=EvaluateConfig(rows=8),
    )
