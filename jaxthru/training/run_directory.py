"""The run directory: the contract between a run and everything that reads it afterwards.

config.json          the resolved configuration; `--config RUN_DIR/config.json` runs it again
environment.json     versions, devices, flags
metrics.jsonl        one object a step, with METRICS_FIELDS; unknown values are null
eval.jsonl           one object an evaluation, with EVAL_FIELDS
tensorboard/         event files
checkpoints/<step>/  Orbax; <step> counts completed updates
profile/<step>/      traces and what was read from them
"""

METRICS_FIELDS = (
    "step",
    "loss",
    "loss_by_source",
    "grad_norm",
    "learning_rate",
    "tokens",
    "step_seconds",
    "tokens_per_second",
    "model_tflops",
    "mfu",
    "data_wait_seconds",
    "host_gap_seconds",
    "checkpoint_seconds",
    "skipped_updates",
    "goodput",
    "hbm_peak_bytes",
)

EVAL_FIELDS = ("step", "loss", "loss_by_source", "tokens")
