"""A small Llama on the text that every machine with jaxthru holds: minutes on two CPU cores."""

from jaxthru.config import RunConfig
from jaxthru.data.loader import DataConfig
from jaxthru.models.layers import PrecisionConfig
from jaxthru.models.llama import ModelConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig
from jaxthru.training.step import TrainConfig


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=200, rows=8),
        model=ModelConfig(vocabulary=8192, layers=4, embed=256, heads=4, kv_heads=2, head_dim=64, mlp=704),
        data=DataConfig(mix="quickstart", sequence=256),
        optim=OptimConfig(learning_rate=3e-3),
        precision=PrecisionConfig(compute="float32"),
        checkpoint=CheckpointConfig(every=50),
        evaluate=EvaluateConfig(rows=64),
    )
