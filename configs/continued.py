"""Continued training of published weights: `--set model.pretrained=FOLDER` gives shape and tokenizer."""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=1000, rows=8),
        data=DataConfig(mix="quickstart", sequence=2048),
        optim=OptimConfig(learning_rate=2e-5, warmup_ratio=0.03),
        checkpoint=CheckpointConfig(every=200),
        evaluate=EvaluateConfig(every=200, rows=64),
    )
