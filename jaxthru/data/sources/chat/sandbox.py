"""Runs chat templates: what Jinja lets them do, in the sandbox, and how long.

Beside Jinja's own they have `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, and
`{% generation %}` around what the assistant says.
"""

import datetime
import json
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxthru.data.sources.chat.marks import SAID, UNSAID
from jaxthru.runtime.errors import InputError, one_line

SECONDS = 10.0
"""What one conversation may take: a template can loop for ever."""
LARGEST = 100_000_000
"""Characters that a template may write, or repeat into one text."""
MESSAGE = 200
"""Characters of an exception's message that are told."""
DAY = datetime.date(2024, 7, 26)
"""The day of `strftime_now` in data, so that a store does not depend on when it was made: the one that Llama
3.2's template takes where no day is to be had."""


class Failure(ValueError):
    """A template did not render a conversation; the message says why, in one line."""


class Compiled:
    """A template, ready to be rendered."""

    def __init__(self, template: jinja2.Template):
        self._template = template

    def render(self, given: Mapping[str, Any], day: datetime.date) -> str:
        """Returns the text of the values `given`, with SAID and UNSAID around what the assistant says.
        Raises Failure."""
        try:
            text = self._template.render(given, strftime_now=_clock(day))
        # A template's own errors, and whatever Python raises for what it does with values.
        except Exception as error:
            raise Failure(_said(error)) from error
        if len(text) > LARGEST:
            raise Failure(f"a text of more than {LARGEST:,} characters")
        return text


def compiled(text: str) -> Compiled:
    """Returns a template. Raises Failure for what is none."""
    try:
        return Compiled(_environment().from_string(text))
    except (jinja2.TemplateError, RecursionError, ValueError) as error:
        raise Failure(_said(error)) from error


def within_limits[Result](function: Callable[[], Result], what: str) -> Result:
    """Returns what a function does, or raises what it raises.

    Raises InputError if it takes more than SECONDS. Nothing can stop it then: it goes on in a thread that
    ends with the process.
    """
    answer: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((function(), None))
        except Exception as error:  # whatever it is, it is raised below
            answer.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = answer.get(timeout=SECONDS)
    except queue.Empty:
        said = f"{what}: took more than {SECONDS:g} s for one conversation; does it loop for ever?"
        raise InputError(said) from None
    if error is not None:
        raise error
    return result


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja's own extensions have it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Returns the block's node."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return SAID + caller() + UNSAID


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses to make of a few characters more than memory holds."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Returns the product or the power. Raises OverflowError for one that is too large."""
        if operator == "**":
            if abs(right) > 64:
                raise OverflowError("a power above 64")
        else:
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and len(one) * int(other) > LARGEST:
                    raise OverflowError(f"a text repeated to more than {LARGEST:,} characters")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """Holds no attribute that Python would take for its own, as `__html__`."""

    def __init__(*given: Any, **attributes: Any):
        self, *given = given  # as Jinja has it: a template may name one `self`
        held = dict(*given, **attributes)
        for name in held:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, held)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace has no attribute {name!r}")


def _environment() -> jinja2.Environment:
    keys = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False, "finalize": _at_run_time}
    made = _Sandbox(**keys, extensions=[Generation, jinja2.ext.loopcontrols])
    made.globals["namespace"] = _Namespace
    made.globals["dict"] = lambda *given, **values: dict(*given, **values)
    del made.globals["lipsum"]
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    return made


@jinja2.pass_context
def _at_run_time(_: jinja2.runtime.Context, value: Any) -> Any:
    """Keeps Jinja from working out constants when a template is compiled, outside the time limit."""
    return value


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own writes HTML's characters as escapes."""
    how = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, **how)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _clock(day: datetime.date) -> Callable[[str], str]:
    return lambda format: datetime.datetime.combine(day, datetime.time()).strftime(format)


def _said(error: Exception) -> str:
    """Returns what an exception says, in one line."""
    own = isinstance(error, jinja2.TemplateError)
    line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    said = str(error) if own and str(error) else f"{type(error).__name__}: {error}"
    return one_line(said)[:MESSAGE] + line
