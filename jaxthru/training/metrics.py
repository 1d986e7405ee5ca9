"""What a run says of each step."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """tensorboard: also write event files. Every step is always written to metrics.jsonl."""

    tensorboard: bool = True
