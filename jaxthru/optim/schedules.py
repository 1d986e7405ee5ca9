"""Learning-rate schedules: warm-up, then cosine, warm-up-stable-decay or constant, by Optax."""

import optax

from jaxthru.optim.optimizer import OptimConfig, standard_promotion


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates already made.

    steps: of the run, which the schedule spans unless `config.schedule_steps` says otherwise.
    """
    return standard_promotion(_schedule(config, config.schedule_steps or steps))


def _schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    peak, final = config.learning_rate, config.learning_rate * config.final_ratio
    warmup = round(config.warmup_ratio * steps)
    warm = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if config.schedule == "constant":
        return optax.join_schedules([warm, optax.constant_schedule(peak)], [warmup])
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final_ratio)
        return optax.join_schedules([warm, decay], [warmup])
    start = steps - round(config.decay_ratio * steps)
    decay = optax.linear_schedule(peak, final, max(steps - start, 1))
    return optax.join_schedules([warm, optax.constant_schedule(peak), decay], [warmup, start])
