"""The shape of Llama 2 13B (arXiv:2307.09288) with a vocabulary of 128,256, on one GPU: 32,768 tokens a step.

14.0 B parameters with an exact float32 master: 26.1 GiB of bfloat16 weights on the device, and 78.2 GiB of
state (6 bytes a parameter), of which the host holds that of 18 of the 40 layers: 31.9 GiB, 41 %.
"""

from jaxthru.config import RunConfig
from jaxthru.data.loader import DataConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.step import TrainConfig
from jaxthru.models.llama import ModelConfig
from jaxthru.models.remat import RematConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=10_000, rows=4, microbatches=2),
        model=ModelConfig(
            vocabulary=128_256,
            layers=40,
            embed=5120,
            heads=40,
            kv_heads=40,
            head_dim=128,
            mlp=13_824,
            max_sequence=8192,
            loop="unroll",
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=3e-4, state="split_master", clip_rule="previous"),
        remat=RematConfig(policy="full"),
        offload=OffloadConfig(level="gradients", fraction=0.45),
        checkpoint=CheckpointConfig(every=1000, keep=1),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
