"""python -m jaxthru.evaluate: a model's scores on the tasks of lm-eval, or on your own."""

import argparse
import contextlib
import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxthru import config as configuration
from jaxthru.build.language_model import LanguageModel, load
from jaxthru.runtime import command_line
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, exit_code, one_line, require

PROG = "python -m jaxthru.evaluate"
EXAMPLE = "runs/quickstart/1 --tasks my_task.yaml --output scores.json"
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until", "multiple_choice")
KEPT = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "n-samples")
"""What of lm-eval's results is written. The rest is about the machine."""


def parse_arguments(argv: list[str] | None = None, prog: str = PROG) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = command_line.parser(prog, "Scores a model on tasks of lm-eval.", EXAMPLE)
    add = parser.add_argument
    add("model", metavar="RUN_OR_FOLDER", help="a run directory, or a folder of published weights")
    what = "YAML files, and names of lm-eval's own tasks, with commas between them"
    add("--tasks", action="append", required=True, metavar="FILE_OR_NAMES", help=what)
    add(
        "--chat", action="store_true", help="ask by the model's chat template; default: the task's plain text"
    )
    add("--limit", type=int, metavar="N", help="only the first N documents of each task; default: all")
    add("--batch", type=int, default=16384, metavar="TOKENS", help="tokens of a pass; default: 16384")
    add("--output", metavar="FILE.json", help="where to write the scores and what they are of")
    add("--step", type=int, metavar="N", help="which checkpoint of a run; default: the newest")
    command_line.add_overrides(parser)
    return parser.parse_args(argv)


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints the table of scores, and writes `--output`. Raises InputError."""
    limit, output = arguments.limit, arguments.output
    require(limit is None or limit >= 1, f"--limit {limit}: must be at least 1")
    require(arguments.batch >= 1, f"--batch {arguments.batch}: must be at least 1")
    if output:
        writable = Path(output).absolute().parent.is_dir() and not Path(output).is_dir()
        require(writable, f"--output {output}: must be a file in a folder that is there")
    # lm-eval forks a pool for some errors of means, which a process with JAX's threads must not.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    lm_eval_model = _adapter()
    model = load(arguments.model, arguments.overrides, step=arguments.step)  # its weights come later
    tasks = load_tasks(arguments.tasks)
    require(jax.process_count() == 1, "evaluate: runs in one process, with all the devices that it sees")
    scores = score(lm_eval_model.JaxthruLM(model, arguments.batch), tasks, limit, arguments.chat)
    print(table(scores), flush=True)
    if output:
        kept = record(scores, arguments.model, model) | {"chat": arguments.chat}
        write_atomically(Path(output), json.dumps(kept, **JSON) + "\n")


def score(lm: Any, tasks: list[Any], limit: int | None = None, chat: bool = False) -> dict[str, Any]:
    """Returns lm-eval's results. lm: what answers. tasks: see `load_tasks`. limit: documents of each task.
    chat: ask by the model's chat template. Raises InputError if it has none."""
    import lm_eval

    if chat:
        lm.model.tokenizer.stop  # noqa: B018 (what is wrong with the template is said now)
    asked = {"limit": limit, "log_samples": False, "apply_chat_template": chat}
    return lm_eval.simple_evaluate(model=lm, tasks=tasks, **asked)


def table(scores: dict[str, Any]) -> str:
    """Returns the results as lm-eval prints them: a row a metric, and below those of groups of tasks."""
    from lm_eval.utils import make_table

    columns = [name for name in ("results", "groups") if scores.get(name)]
    return "\n".join(make_table(scores, name) for name in columns).strip()


def record(scores: dict[str, Any], where: str, model: LanguageModel) -> dict[str, Any]:
    """Returns what `--output` holds: lm-eval's results, versions and settings, and what they are of."""
    kept = {name: scores[name] for name in KEPT if scores.get(name)}
    of = {"model": str(where), "step": model.step, "config": configuration.to_dict(model.config)}
    return kept | of | {"lm_eval": scores.get("lm_eval_version"), "limit": scores["config"]["limit"]}


def load_tasks(words: list[str]) -> list[Any]:
    """Returns lm-eval's tasks and groups of tasks, their documents loaded.

    words: paths of YAML files and names, several in one with commas between them. Files named in a YAML are
    looked for beside it, and what it names as `!function` is run.
    Raises InputError for what does not exist, cannot be loaded or cannot be asked of a text model.
    """
    words = [each.strip() for word in words for each in word.split(",") if each.strip()]
    require(bool(words), "no task: give --tasks FILE.yaml, or names of lm-eval's tasks")
    files = [word for word in words if _is_file(word)]
    for word in files:
        require(Path(word).is_file(), f"--tasks {word}: no such file")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=len(files) < len(words))
    found = []
    for word in words:
        found += _loaded(manager, word) if word in files else _named(manager, word)
    for task in [task for each in found for task in _members(each)]:
        _check(task)
    return found


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or Path(word).is_file()


def _named(manager: Any, word: str) -> list[Any]:
    names = manager.match_tasks([word])
    if not names:
        near = difflib.get_close_matches(word, manager.all_tasks, n=1)
        said = f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists them; a file ends in .yaml"
        raise InputError(f"--tasks {word}: no such task of lm-eval; {said}")
    return [task for name in names for task in _loaded(manager, name)]


def _loaded(manager: Any, word: str) -> list[Any]:
    """Returns the outermost groups of a file or name, or its tasks where it is none."""
    file = _is_file(word)
    # The library finds the files of a data set from the folder that the process is in.
    inside = contextlib.chdir(Path(word).absolute().parent) if file else contextlib.nullcontext()
    try:
        with inside:
            loaded = manager.load([Path(word).name if file else word])
    except Exception as error:  # of four libraries, which have no class in common
        wanted = "" if file else "; its documents are downloaded, unless they have been before"
        why = one_line(f"{type(error).__name__}: {error}".split("\n")[0])
        raise InputError(f"--tasks {word}: cannot be loaded ({why}){wanted}") from error
    inner = {name for names in loaded["group_map"].values() for name in names}
    groups = [group for name, group in loaded["groups"].items() if name not in inner]
    return groups or list(loaded["tasks"].values())


def _members(found: Any) -> list[Any]:
    return found.get_all_tasks() if hasattr(found, "get_all_tasks") else [found]


def _check(task: Any) -> None:
    name = task.config.task
    require(not getattr(task, "UNSAFE_CODE", False), f"{name}: runs code that the model writes; not built")
    require(not getattr(task, "MULTIMODAL", False), f"{name}: asks for more than text; not built")
    said = f"{name}: output_type = {task.OUTPUT_TYPE}: must be one of {', '.join(KINDS)}"
    require(task.OUTPUT_TYPE in KINDS, said)


def _adapter() -> Any:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise InputError("needs lm-eval: pip install 'jaxthru[evaluate]'") from error
    from jaxthru.build import lm_eval_model

    return lm_eval_model


def _plain(value: Any) -> Any:
    """Returns what JSON can hold: functions of tasks as they are called."""
    return value.item() if isinstance(value, np.generic) else getattr(value, "__name__", str(value))


JSON = {"indent": 2, "ensure_ascii": False, "default": _plain}


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, 2 for bad input."""
    arguments = parse_arguments(argv, prog)
    command_line.log_to_stderr()
    return exit_code(lambda: evaluate(arguments))


if __name__ == "__main__":
    sys.exit(main())
