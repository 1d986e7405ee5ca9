"""Llama 3.1 8B (arXiv:2407.21783) on one GPU, its optimizer state in host memory: 65,536 tokens a step.

8.03 B parameters: 15.0 GiB of bfloat16 weights, and 44.9 GiB of state (a remainder that makes the weight the
exact float32 master, and bfloat16 moments: 6 bytes a parameter), of which the host holds 26 GiB, so that the
device needs about 60. Each layer is updated right after its backward, so that its gradients are all that
exist.
"""

from jaxthru.config import RunConfig
from jaxthru.data.loader import DataConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.step import TrainConfig
from jaxthru.models.llama import ModelConfig, RopeScaling
from jaxthru.models.remat import RematConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=10_000, rows=8, microbatches=4),
        model=ModelConfig(
            vocabulary=128_256,
            layers=32,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14_336,
            max_sequence=131_072,
            rope_scaling=RopeScaling(),
            loop="unroll",
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4, state="split_master", clip_rule="previous"),
        remat=RematConfig(policy="full"),
        offload=OffloadConfig(level="gradients", fraction=0.6),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
