"""`jaxthru config`: every key of a configuration with its type, default, choices and meaning.

All of it is read from the configuration's dataclasses; a meaning stands in the docstring of the key's class,
as `name: text` or `name, other: text`. `--markdown` prints docs/configuration.md.
"""

import dataclasses
import json
import re
import sys
import textwrap
import types
import typing
from typing import Any, Literal

import rich.console
import rich.text

from jaxthru import config as configuration
from jaxthru.models import family
from jaxthru.runtime import command_line, plain
from jaxthru.runtime.errors import InputError, did_you_mean, exit_code, require

REQUIRED = object()
"""The default of a key that has none."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key. name: the whole one, as `--set` takes it. meaning: empty if no docstring has one."""

    name: str
    declared: Any
    default: Any
    meaning: str

    @property
    def kind(self) -> str:
        """Returns the type in words; of a key with choices, these."""
        return kind_of(self.declared)

    @property
    def shown(self) -> str | None:
        """Returns the default as `--set` takes it, None if the key has to be given."""
        return None if self.default is REQUIRED else _shown(self.default)

    @property
    def changeable(self) -> bool:
        """Says whether a run may be resumed with another value."""
        return configuration.changeable(self.name)


@dataclasses.dataclass(frozen=True)
class Group:
    """A group's keys, with those of groups within it. meaning: one sentence. more: what holds for all."""

    name: str
    meaning: str
    more: str
    keys: tuple[Key, ...]


def groups(model_family: str = family.SHIPPED[0]) -> dict[str, Group]:
    """Returns {name: group} of a configuration whose model is of a family."""
    _, about = documented(configuration.RunConfig)
    made = {}
    for name, declared in plain.fields(configuration.RunConfig).items():
        cls = configuration.group_in(declared, {"family": model_family})
        more, _ = documented(cls)
        made[name] = Group(name, about.get(name, ""), more, tuple(_keys(cls, f"{name}.")))
    return made


def _keys(cls: type, prefix: str) -> list[Key]:
    """Returns the keys of a group's class, those of a group within it behind the key that is that group."""
    _, about = documented(cls)
    found = []
    if issubclass(cls, family.FamilyConfig):
        name = cls.__module__.removeprefix(f"{family.__package__}.")
        found.append(Key(f"{prefix}family", str, name, about.get("family", "")))
    declared = plain.fields(cls)
    for field in dataclasses.fields(cls):
        kind, name = declared[field.name], prefix + field.name
        found.append(Key(name, kind, _default(field), about.get(field.name, "")))
        if (within := configuration.group_in(kind)) is not None:
            found += _keys(within, f"{name}.")
    return found


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return REQUIRED if field.default_factory is dataclasses.MISSING else field.default_factory()


def documented(cls: type) -> tuple[str, dict[str, str]]:
    """Returns what the docstrings of a dataclass and its bases say of it, and {key: meaning}."""
    lead, found = "", {}
    for base in reversed(cls.__mro__):
        text = base.__dict__.get("__doc__") or ""
        if not dataclasses.is_dataclass(base) or text.startswith(
            f"{base.__name__}("
        ):  # made by dataclass itself
            continue
        names = "|".join(map(re.escape, ("family", *plain.fields(base))))
        marker = re.compile(rf"(?:^[ \t]*|(?<=[.!?)]\s))((?:{names})(?:,\s+(?:{names}))*):\s+", re.MULTILINE)
        first, *rest = marker.split(text)
        lead = " ".join(first.split())
        for keys, meaning in zip(rest[::2], rest[1::2], strict=True):
            said = " ".join(meaning.split())
            found |= dict.fromkeys(re.split(r",\s+", keys), said[:1].upper() + said[1:])
    return lead, found


def kind_of(declared: Any) -> str:
    """Returns a declared type in words."""
    options = typing.get_args(declared)
    if typing.get_origin(declared) in plain.UNIONS:
        return " or ".join(kind_of(option) for option in options)
    if typing.get_origin(declared) is Literal:
        return "one of " + ", ".join(map(_shown, options))
    if typing.get_origin(declared) is tuple:
        return f"list of {kind_of(options[0])}"
    if dataclasses.is_dataclass(declared):
        return "group of keys"
    return "None" if declared is types.NoneType else getattr(declared, "__name__", str(declared))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(value)
    return value if isinstance(value, str) else repr(value)


ON_RESUME = {True: "may change", False: "fixed"}
LEGEND = (
    "A default holds where neither the configuration's file nor --set gives a value. "
    "`may change` and `fixed` say whether a run can be resumed with another value."
)
WIDEST = 100
"""Columns of a line at most, in a terminal that has them; 80 in a pipe."""


def lines(chosen: list[Group], width: int) -> list[tuple[str, int]]:
    """Returns the lines for a terminal of so many columns, and how many characters of each are bold."""
    made: list[tuple[str, int]] = []
    for group in chosen:
        made += [(line, len(line)) for line in _wrapped(f"{group.name}: {group.meaning}", width, "")]
        made += [(line, 0) for line in _wrapped(group.more, width, "")]
        for key in group.keys:
            head = key.name if key.shown is None else f"{key.name} = {key.shown}"
            needed = "; must be given" if key.shown is None else ""
            facts = f"{head}  ({key.kind}; {ON_RESUME[key.changeable]}{needed})"
            first, *more = _wrapped(facts, width, "", "    ")
            made += [("", 0), (first, len(head)), *((line, 0) for line in more)]
            made += [(line, 0) for line in _wrapped(key.meaning, width, "    ")]
        made.append(("", 0))
    return made


def _wrapped(text: str, width: int, indent: str, hanging: str | None = None) -> list[str]:
    indents = {"initial_indent": indent, "subsequent_indent": indent if hanging is None else hanging}
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **indents)


def page(found: dict[str, Group]) -> str:
    """Returns docs/configuration.md."""
    parts = [
        "# Configuration",
        "You want to change a setting: find its key here, and give it as `--set GROUP.KEY=VALUE`, or in a\n"
        "file like those in [configs/](../configs). In a terminal, `jaxthru config` prints what this page\n"
        "says, `jaxthru config optim` prints one group, and `jaxthru config optim.clip` one key.",
        "A default holds where neither the file nor `--set` gives a value. When a run is resumed, a key\n"
        "that **may change** may have another value; a key that is **fixed** must have the value that the\n"
        "run was started with.",
        "`jaxthru config --markdown > docs/configuration.md` makes this page.",
        "\n".join(f"- [{group.name}](#{group.name}): {_markdown(group.meaning)}" for group in found.values()),
    ]
    for group in found.values():
        rows = [
            (
                f"`{key.name}`",
                _choices(key.declared),
                "must be given" if key.shown is None else f"`{key.shown}`",
                ON_RESUME[key.changeable],
                _markdown(key.meaning),
            )
            for key in group.keys
        ]
        head = ("key", "type", "default", "on resume", "meaning")
        table = [head, ("---",) * len(head), *rows]
        parts += [
            f"## {group.name}",
            " ".join(filter(None, (_markdown(group.meaning), _markdown(group.more)))),
        ]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in table))
    return "\n\n".join(parts) + "\n"


def _choices(declared: Any) -> str:
    """Returns a type in words for a table; each choice is code, for they are copied."""
    if typing.get_origin(declared) is Literal:
        return ", ".join(f"`{_shown(choice)}`" for choice in typing.get_args(declared))
    return kind_of(declared)


def _markdown(text: str) -> str:
    """Returns a text whose signs that Markdown or HTML would take for their own are escaped, outside code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*|_])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    parts[1::2] = [part.replace("|", r"\|") for part in parts[1::2]]
    return "`".join(parts)


def choose(found: dict[str, Group], name: str | None) -> list[Group]:
    """Returns the groups to show: all; one; or that of a key, with this key and those within it alone.

    Raises InputError for a name that is neither a group's nor a key's.
    """
    if name is None:
        return list(found.values())
    if name in found:
        return [found[name]]
    for group in found.values():
        keys = tuple(key for key in group.keys if f"{key.name}.".startswith(f"{name}."))
        if keys:
            return [dataclasses.replace(group, keys=keys)]
    model_family = found["model"].keys[0].default
    hint = plain.nearest(name, configuration.declared_keys(model_family)) or did_you_mean(name, list(found))
    raise InputError(f"no group or key {name}{hint}")


def _family(overrides: list[str]) -> str:
    """Returns the family that `--set model.family=NAME` asks for, and imports it. Raises InputError."""
    name = family.SHIPPED[0]
    for override in overrides:
        key, _, name = (part.strip() for part in override.partition("="))
        require(
            key == "model.family", f"--set {override}: only model.family=NAME decides which keys there are"
        )
        family.config_class(name, trusted=True)
    return name


def _print(chosen: list[Group]) -> None:
    """Prints groups in the colours and the width of a terminal, or plainly in 80 columns to a pipe."""
    console = rich.console.Console(highlight=False)
    console.width = width = min(console.width, WIDEST) if console.is_terminal else 80
    shown = [*lines(chosen, width), *((line, 0) for line in _wrapped(LEGEND, width, ""))]
    for line, bold in shown:
        text = rich.text.Text(line)
        text.stylize("bold", 0, bold)
        text.highlight_regex(r"`[^`]+`", "cyan")
        console.print(text, soft_wrap=True)


def main(argv: list[str] | None = None, prog: str = "python -m jaxthru.config") -> int:
    """Runs the command; returns its exit code: 2 for bad input, 130 for Ctrl-C."""
    says = "Explains every key of a configuration: its type, default, choices and meaning."
    parser = command_line.parser(prog, says, "optim")
    parser.add_argument("name", nargs="?", metavar="GROUP[.KEY]", help="default: all groups")
    own = "explain the keys of another model family, NAME: a module that python can import"
    parser.add_argument("--set", action="append", default=[], metavar="model.family=NAME", help=own)
    parser.add_argument("--markdown", action="store_true", help="print the page docs/configuration.md")
    arguments = parser.parse_args(argv)

    def command() -> None:
        found = groups(_family(arguments.set))
        if arguments.markdown:
            require(
                arguments.name is None, f"--markdown {arguments.name}: the page has all groups; give none"
            )
            print(page(found), end="")
        else:
            _print(choose(found, arguments.name))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
