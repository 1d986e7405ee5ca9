"""A Llama of 30.6 B parameters on one GPU of 141 GB, in Llama 3's proportions: 65,536 tokens a step.

60 layers of d 6144, 48 heads of 128 (8 of keys and values), ffn 21,504 = 3.5 d, vocabulary 128,256: a layer
has 88.1 M parameters of attention and 396.4 M of MLP; embedding and output have 788 M each. 57.1 GiB of
bfloat16 weights and about 116 GiB of state (a remainder that makes the weight the exact float32 master, and
8-bit moments: 4 bytes a parameter and their scales). Half of both, and the layers' inputs (45 GiB), are on
the host.
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
        train=TrainConfig(steps=10_000, rows=8, microbatches=4),
        model=ModelConfig(
            vocabulary=128_256,
            layers=60,
            embed=6144,
            heads=48,
            kv_heads=8,
            head_dim=128,
            mlp=21_504,
            max_sequence=8192,
            loop="unroll",
        ),
        data=DataConfig(mix="quickstart", sequence=8192),
        optim=OptimConfig(learning_rate=1.5e-4, state="split_master_int8", clip_rule="previous"),
        remat=RematConfig(policy="full"),
        offload=OffloadConfig(level="parameters", fraction=0.5, activations="inputs", host_gib=230),
        checkpoint=CheckpointConfig(every=1000, keep=1),
        evaluate=EvaluateConfig(every=1000, rows=64),
    )
