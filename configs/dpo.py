"""Direct preference optimisation: `--set model.pretrained=FOLDER`, `--set data.mix=MIX` of pairs of yours.

The mix here needs `python -m pip install chitchat-dataset`. Without a folder a small model starts afresh.
"""

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
        train=TrainConfig(steps=200, rows=8, objective="dpo", dpo_beta=0.1),
        data=DataConfig(mix="chitchat_pairs", sequence=1024),
        optim=OptimConfig(learning_rate=1e-6, warmup_ratio=0.1, weight_decay=0.0),
        checkpoint=CheckpointConfig(every=100),
        evaluate=EvaluateConfig(every=50, rows=32),
    )
