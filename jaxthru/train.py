"""python -m jaxthru.train: one command from a configuration to a trained model."""

import argparse
import contextlib
import dataclasses
import logging
import time
import traceback
from pathlib import Path
from typing import NoReturn

from jaxthru.runtime import garbage, termination

if __name__ == "__main__":  # before what takes seconds to import
    termination.handle()
    garbage.collect_seldom()

from jaxthru import config as configuration
from jaxthru.build import choices, pinned_host
from jaxthru.build.adapted_weights import published_weights
from jaxthru.build.batches import open_shared, prepared
from jaxthru.build.cache_prefetch import CachePrefetch
from jaxthru.build.checks import check_kernels, check_objective
from jaxthru.build.compiled import Build, compile_step, fit_here
from jaxthru.build.reference_model import reference_model
from jaxthru.build.resuming import check_resumable, chosen_anew, keys_of_run, recorded, schedule_changed
from jaxthru.build.step import facts_of
from jaxthru.config import RunConfig
from jaxthru.data.loading.preview import opening
from jaxthru.data.loading.state import DataState, check_packing
from jaxthru.data.store.mix_file import load_mix
from jaxthru.engine.offload import in_place
from jaxthru.engine.step import State
from jaxthru.profile.collect.trace import open_profile
from jaxthru.profile.show.publish import present
from jaxthru.runtime import allocator, command_line, distributed, exit_codes, memory_pool, peers, xla
from jaxthru.runtime.errors import exit_code, leave
from jaxthru.runtime.stop_signal import StopSignal
from jaxthru.training import local_tier
from jaxthru.training.base_files import BaseFiles
from jaxthru.training.checkpoint import Checkpointer, newest_step
from jaxthru.training.display import final_table, open_progress
from jaxthru.training.goodput import EVALUATION, PLACEMENT, PROFILE, SAVE, open_goodput
from jaxthru.training.record import open_record
from jaxthru.training.run_directory import RunDirectory, check_place
from jaxthru.training.sinks.tracker import check_trackers, left_behind
from jaxthru.training.stalls import Stalls
from jaxthru.training.start import StartTimes
from jaxthru.training.stragglers import Stragglers
from jaxthru.training.tier import Tier
from jaxthru.training.watchdog import Watchdog

log = logging.getLogger("jaxthru")


def train(
    built: Build, directory: RunDirectory, checkpointer: Checkpointer, started: float, times: StartTimes
) -> int:
    """Runs the loop from the newest checkpoint, or from the start; returns the exit code: 0, or that of a
    stop."""
    config, data, train = built.config, built.data, built.config.train
    state, data_state = restore_or_start(built, directory, checkpointer)
    times.note("state")
    step = start = data_state.step
    steps = data.last_step(data_state.schedule, seed=train.seed, rows=train.rows, steps=train.steps)
    goodput = open_goodput(directory.path, start, times)
    directory.cut(start)
    evaluation, placement = built.evaluation(), built.expert_placement()
    with (
        goodput,
        garbage.heap_frozen(),
        open_record(config.metrics, directory, start, times, Stalls(), Stragglers(peers.current())) as record,
        built.batches(data_state) as batches,
        open_progress(steps, start) as progress,
        Watchdog(end=peers.current().end) as watchdog,
        StopSignal() as stop,
        peers.current().telling(),  # what is around it may take long to leave
    ):
        timer = built.step_timer(int(state["skipped"]), started, record, progress, watchdog)
        about = built.compiled, built.recompile, start, steps, present, facts_of(config), progress.wait
        profile = open_profile(config.profile, directory.profile, *about)

        def evaluate(step: int) -> None:
            with timer.between_steps(), profile.span("evaluate"), goodput.spending(EVALUATION):
                row = evaluation(step, state["params"])
                record.evaluation(row)
                for sample in row.get("samples", ()):
                    progress.sample(sample["prompt"], sample["text"])

        def save(step: int, tier: Tier | None = None) -> None:
            with timer.saving(), profile.span("checkpoint"), goodput.spending(SAVE):
                reached = dataclasses.replace(data_state, step=step).to_json()
                checkpointer.save(step, built.saved_part(state), reached, tier)

        goodput.ready()
        if start == 0 and evaluation.due(0, last=False):
            evaluate(0)
            times.note("evaluation")
        timer.restart_clock()
        while step < steps and not stop.should_stop(step + 1):
            step += 1
            timer.check_idle()
            with timer.waiting(), profile.span("data_wait"):
                batch = next(batches)
            if profile.begins(step):
                with timer.between_steps(), goodput.spending(PROFILE):
                    profile.begin()
            timer.dispatching()
            with profile.span("dispatch", step):
                state, metrics = profile.program(state, batch)
            timer.dispatched(step, metrics, first=step == start + 1)
            profile.after(step - 1)
            last = step == steps
            tier = checkpointer.due(step, last)
            if evaluation.due(step, last) or tier or placement.due(step):
                timer.finish_step()  # a checkpoint never runs ahead of the record
                profile.after(step)
                state = built.compiled.settled(state)
                if placement.due(step):  # of the last step too: the run may be made longer
                    with timer.between_steps(), profile.span("place_experts"), goodput.spending(PLACEMENT):
                        state = placement(state, metrics)
                if evaluation.due(step, last):
                    evaluate(step)
                if tier:
                    save(step, tier)
        timer.finish_step()
        profile.close()
        state = built.compiled.settled(state)
        if (step < steps or step == start) and config.checkpoint.last:
            save(step)  # of a run that only had a local one of its last step, too
        if step < steps and config.checkpoint.last:
            log.info("stopped after step %d; the state is saved", step)
        with watchdog.paused(), goodput.spending(SAVE):
            checkpointer.wait()
        with watchdog.paused(), goodput.spending(PROFILE):
            profile.finish()  # once nothing can be lost any more
    return exit_codes.FINISHED if step >= steps else stop.exit_code


def restore_or_start(
    built: Build, directory: RunDirectory, checkpointer: Checkpointer
) -> tuple[State, DataState]:
    """Returns the newest checkpoint's state and data state, or those before the first update; what the
    objective asks of its reference model comes with the data from here on."""
    data, restored = built.data, checkpointer.restore(built.saved_part(built.abstract))
    if restored is None:
        state, data_state = built.first_state(), DataState.first(data.mixture, data.keys)
        reference = reference_model(built, directory, data_state)
        reference.ask(state["params"])
    else:
        step, state, saved = restored
        log.info("resumed from step %d", step)
        if line := schedule_changed(built.before, built.config, step):
            log.info("%s", line)
        best_fit = built.config.data.packing == "best_fit"
        kinds = {"whole": best_fit or data.masked, "cut": not best_fit and None in data.counted.values()}
        check_packing(saved, built.config.data.sequence, data.segments, **kinds)
        data_state = DataState.from_json(saved).resumed(step, data.mixture, data.keys)
        reference = reference_model(built, directory, data_state)
        if reference.missing:  # of steps that the run was not to have before
            del restored, state  # there is room for one
            reference.ask_first_state()
            _, state, _ = checkpointer.restore(built.saved_part(built.abstract))
        state = built.restored(state)
    reference.feed()
    return state, data_state


def run(
    config: RunConfig,
    directory: RunDirectory | Path | str | None = None,
    *,
    name: str | None = None,
    resume: str = "auto",
) -> RunDirectory:
    """Trains, from the data's preparation to the final table, and returns the run directory.

    directory: what it holds is continued; None makes a fresh runs/<name>/<n>. name: by default that of the
    file which `load_config` read, else `run`. resume: as on the command line.
    Raises InputError or TrainingError, with a message of one line.
    """
    return start_or_resume(config, directory, name=name, resume=resume)[0]


def start_or_resume(
    config: RunConfig,
    directory: RunDirectory | Path | str | None = None,
    *,
    name: str | None = None,
    resume: str = "auto",
) -> tuple[RunDirectory, int]:
    """Does what `run` does; returns the run directory and the exit code: whether it has finished."""
    started, times = time.monotonic(), StartTimes()
    name = name or config.name
    check_trackers(config.metrics)
    xla.configure(config.kernels.writes_to_peers)
    distributed.initialize(watched=True)
    with peers.watched():
        if isinstance(directory, Path | str):
            directory = RunDirectory(directory, trains=True)
        return _prepare_and_train(config, directory, name, resume, started, times)


def _prepare_and_train(
    config: RunConfig,
    directory: RunDirectory | None,
    name: str,
    resume: str,
    started: float,
    times: StartTimes,
) -> tuple[RunDirectory, int]:
    pinned_host.limit(config)
    newest, local = None, None
    local_tier.check(config.checkpoint.local)
    if directory:
        distributed.from_first(lambda: check_resumable(config, directory, resume))
        newest = newest_step(directory.checkpoints)
        if (newest or 0) >= config.train.steps:
            log.info("%s is complete", directory.where)
            final_table(directory)
            return directory, exit_codes.FINISHED
        local = local_tier.located(directory.path, config.checkpoint.local)
    begun = keys_of_run(directory, local) if directory else None
    begun_with, chosen = recorded(directory)
    asked, chosen = choices.reopened(config), (*choices.of_file(config), *chosen)
    memory_pool.take_ahead()
    config = choices.resolve(asked, begun_with, chosen)
    for line in config.model.warnings:
        log.warning("%s", line)
    kept = directory.tokenizer if directory else None
    with CachePrefetch(repr(asked)):
        layout = fit_here(config, begun=begun, kept=kept)
        if begun_with is None and asked.kernels.any_named:  # a run that goes on has compiled them
            check_kernels(config, layout)
        fresh = newest is None and not local_tier.common_steps(local)
        weights = published_weights(config, fresh) if fresh or config.lora.on else None
        distributed.from_first(lambda: check_place(directory, name))
        log.info("preparing data: mix %s ...", config.data.mix)
        recipes = load_mix(config.data.mix, config.data.tokenizer, kept).recipes
        check_objective(config, {name: recipe.options.unit for name, recipe in recipes.items()})
        data = open_shared(config.data, prepared(config.data, begun, kept), kept)
        for line in (*data.account, *opening(data)):
            log.info("%s", line)
        directory = directory or RunDirectory.fresh(name)
        autotuned = directory.autotune if config.train.deterministic else None
        times.note("data")
        base = BaseFiles(weights.folder, directory.base) if config.lora.on and weights else None
        how = {"asked": asked, "fresh": fresh, "checked": True}
        built = compile_step(config, layout, data, autotuned, weights, **how)
    built = dataclasses.replace(built, before=begun_with)
    times.note("compile")
    for line in chosen_anew(begun_with, asked, built.config):
        log.info("chosen anew: %s", line)
    saved = directory.checkpoints, config.checkpoint, in_place(built.saved_part(built.abstract))
    with data, directory.locked(), contextlib.ExitStack() as stack:
        local = local_tier.located(directory.path, config.checkpoint.local, begin=True)
        # Only who holds the lock may clear away what looks like the rest of a killed save.
        checkpointer = stack.enter_context(Checkpointer(*saved, local, directory.send))
        distributed.from_first(lambda: configuration.dump(built.config, directory.config))
        chosen = choices.still_true(chosen, built.config, built.choices)
        distributed.from_first(lambda: choices.write(directory.choices, chosen))
        directory.write_environment()
        directory.keep_tokenizer(lambda: data.tokenizer.kept)
        if weights:
            directory.keep_base(weights.folder.path)
        distributed.from_first(directory.send)
        if base:
            base.settle()
        code = train(built, directory, checkpointer, started, times)
    log.debug("compiled %d programs, %d from the cache", *xla.compilations())
    final_table(directory)
    return directory, code


PROG = "python -m jaxthru.train"
EXAMPLE = "--config quickstart --set train.steps=20"


def parse_arguments(argv: list[str] | None = None, prog: str = PROG) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = command_line.parser(prog, "Trains a model, or continues a run.", EXAMPLE)
    configuration.add_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="default: a fresh runs/<config>/<n>")
    resume = "auto continues what DIR holds; never refuses a DIR that holds a run"
    parser.add_argument("--resume", choices=("auto", "never"), default="auto", help=resume)
    verbose = "log details, such as how many programs were compiled"
    parser.add_argument("--verbose", action="store_true", help=verbose)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, one of `runtime.exit_codes`."""

    def command() -> int:
        config = configuration.from_arguments(arguments)
        termination.set_exit_code(config.train.stopped_exit_code)
        return start_or_resume(config, arguments.run_dir, resume=arguments.resume)[1]

    arguments = parse_arguments(argv, prog)
    command_line.log_to_stderr(logging.DEBUG if arguments.verbose else logging.INFO)
    return exit_code(command, "interrupted before training began; nothing is lost")


def start(argv: list[str] | None = None, prog: str = PROG) -> NoReturn:
    """Runs the command as a process of its own, and ends that."""
    allocator.keep_freed()  # not of a process that is another's
    garbage.collect_seldom()
    try:
        code = main(argv, prog)
    except Exception:
        if not peers.current().fault:
            raise
        with contextlib.suppress(OSError):  # of a log on the disk that is full
            traceback.print_exc()  # and no end of the interpreter's, which would wait for the others
        code = exit_codes.CANNOT_GO_ON
    leave(code, left_behind())


if __name__ == "__main__":
    start()
