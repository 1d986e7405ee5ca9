"""python -m jaxthru.generate: text from a run's checkpoint, or from published weights."""

import argparse
import sys
from pathlib import Path

from jaxthru.build.language_model import LanguageModel, load
from jaxthru.runtime import command_line
from jaxthru.runtime.errors import InputError, exit_code, require
from jaxthru.training.display import printable

PROG = "python -m jaxthru.generate"
EXAMPLE = 'runs/quickstart/1 --prompt "def main(" --max-tokens 64'


def parse_arguments(argv: list[str] | None = None, prog: str = PROG) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = command_line.parser(prog, "Continues prompts with a trained model.", EXAMPLE)
    add = parser.add_argument
    add("model", metavar="RUN_OR_FOLDER", help="a run directory, or a folder of published weights")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--file", metavar="FILE", help="prompts, one a line; - is standard input")
    add("--max-tokens", type=int, default=128, metavar="N", help="at most so many a prompt; default: 128")
    own = "default: the model's generation_config.json, without one"
    add("--temperature", type=float, metavar="X", help=f"0 takes the most probable token; {own} 0")
    add("--top-k", type=int, metavar="N", help=f"sample among the N most probable tokens; {own} all")
    add("--top-p", type=float, metavar="P", help=f"among those that make up P of the probability; {own} 1")
    add("--seed", type=int, default=0, metavar="N", help="of the samples; default: 0")
    add("--step", type=int, metavar="N", help="which checkpoint of a run; default: the newest")
    command_line.add_overrides(parser)
    return parser.parse_args(argv)


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the prompts of a command line, those of its file last. Raises InputError."""
    found = list(arguments.prompt)
    if arguments.file:
        try:
            whole = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--file {arguments.file}: cannot be read as text ({error})") from error
        found += [line for line in whole.split("\n") if line]
    require(bool(found), "no prompt: give --prompt TEXT, or --file FILE")
    return found


def generate(arguments: argparse.Namespace) -> None:
    """Prints each prompt with what follows it, an empty line between two. Raises InputError."""
    prompts = prompts_of(arguments)
    model: LanguageModel = load(arguments.model, arguments.overrides, step=arguments.step)
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    texts = model.generate(prompts, **{name: getattr(arguments, name) for name in names})
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        said = prompt + text
        print(("\n" if index else "") + (printable(said) if sys.stdout.isatty() else said))


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, 2 for bad input."""
    arguments = parse_arguments(argv, prog)
    command_line.log_to_stderr()
    return exit_code(lambda: generate(arguments))


if __name__ == "__main__":
    sys.exit(main())
