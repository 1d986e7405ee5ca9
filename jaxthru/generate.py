"""python -m jaxthru.generate: text from a run's checkpoint, or from published weights."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxthru.build.conversation import Conversation
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
    add("--chat", action="store_true", help="a conversation: your lines, and the model's answers to them")
    add("--system", metavar="TEXT", help="with --chat: what the model is told before")
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="at most so many a prompt, or an answer; default: 128",
    )
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
    require(arguments.system is None, "--system: is of a conversation; add --chat")
    model: LanguageModel = load(arguments.model, arguments.overrides, step=arguments.step)
    texts = model.generate(prompts, **_options(arguments))
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        said = prompt + text
        print(("\n" if index else "") + (printable(said) if sys.stdout.isatty() else said))


def chat(arguments: argparse.Namespace) -> None:
    """Answers each line of standard input, until it ends or /exit. Raises InputError."""
    given = bool(arguments.prompt) or bool(arguments.file)
    require(not given, "--chat: reads what you say from standard input; leave out --prompt and --file")
    model: LanguageModel = load(arguments.model, arguments.overrides, step=arguments.step)
    conversation = Conversation.of(model, arguments.system, **_options(arguments))
    begun, people = list(conversation.messages), sys.stdin.isatty()
    if people:
        print("/new begins a new conversation; /exit or Ctrl-D ends.")
    while (words := _read("> " if people else "")) not in (None, "/exit"):
        if words == "/new":
            conversation.messages = list(begun)
        elif words.strip():
            try:
                conversation.answer(words, _show)
            except InputError as error:
                if not people:
                    raise
                print(f"jaxthru: {error}", end="")
            print("\n" if people else "")


def _read(prompt: str) -> str | None:
    """Returns a line of standard input, None at its end."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: is not text ({error})") from error


def _show(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    return {name: getattr(arguments, name) for name in names}


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, 2 for bad input."""
    arguments = parse_arguments(argv, prog)
    command_line.log_to_stderr()
    return exit_code(lambda: chat(arguments) if arguments.chat else generate(arguments))


if __name__ == "__main__":
    sys.exit(main())
