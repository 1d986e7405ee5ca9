"""Low-rank adapters on conversations: `--set model.pretrained=FOLDER`, `--set data.mix=MIX` of yours.

The mix here needs `python -m pip install chitchat-dataset`. Without a folder, adapters are trained beside
random weights: to see that it runs.
"""

from jaxthru.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LoraConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)


def config() -> RunConfig:
    return RunConfig(
        train=TrainConfig(steps=200, rows=8),
        lora=LoraConfig(rank=16, alpha=32),
        data=DataConfig(mix="chitchat", sequence=2048),
        optim=OptimConfig(learning_rate=1e-4, warmup_ratio=0.03, weight_decay=0.0),
        checkpoint=CheckpointConfig(every=100),
        evaluate=EvaluateConfig(every=50, rows=32),
    )
