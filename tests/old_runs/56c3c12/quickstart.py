"""A small Llama on the text that every machine with jaxthru holds: a few minutes on two CPU cores."""

from jaxthru.data.loader import DataConfig
from jaxthru.training.step import TrainConfig

from jaxthru.config import RunConfig
from jaxthru.models.layers import PrecisionConfig
from jaxthru.models.llama import ModelConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=200, rows=8),
        model=ModelConfig(
            vocabulary=8192,
            layers=4,
            embed=192,
            heads=6,
            kv_heads=2,
            head_dim=32,
            mlp=512,
            max_sequence=1024,
            attention="xla",  # runs in float32 on any device; rows this short cost it nothing
        ),
        data=DataConfig(mix="quickstart", sequence=256),
        optim=OptimConfig(learning_rate=3e-3, warmup_ratio=0.05),
        precision=PrecisionConfig(compute="float32"),  # a CPU is four times slower in bfloat16
        checkpoint=CheckpointConfig(every=50),
        evaluate=EvaluateConfig(rows=64),
    )
