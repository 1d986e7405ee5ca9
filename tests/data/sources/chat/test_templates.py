"""Templates render what Jinja's sandbox lets them, and say which of it is the assistant's."""

import datetime
import json
import re

import pytest
from chatting import CHATML, HELLO, MORE, TAGGED, folder

from jaxthru.data.sources.chat import sandbox
from jaxthru.data.sources.chat.marks import CLOSE, OPEN
from jaxthru.data.sources.chat.sandbox import Failure
from jaxthru.data.sources.chat.template import ChatTemplate
from jaxthru.data.sources.chat.turns import MISTRAL
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.errors import InputError

CONTROL = re.compile("|".join(map(re.escape, ("<|im_start|>", "<|im_end|>", "<s>", "</s>"))))
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def made(text: str) -> ChatTemplate:
    return ChatTemplate(text, "t.jinja", NAMES, CONTROL)


def said(rendered) -> list[str]:
    return [rendered.text[begin:end] for begin, end in rendered.trained]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("template", "text", "trained"),
    [
        (
            CHATML,
            "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nA row.<|im_end|>\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nThe token, the row.<|im_end|>\n",
            ["A row.<|im_end|>\n", "The token, the row.<|im_end|>\n"],
        ),
        (
            TAGGED,  # which leaves the end of the turn outside
            "<s>[user]Hello?</s>[assistant]A row.</s>[user]And?</s>[assistant]The token, the row.</s>",
            ["A row.</s>", "The token, the row.</s>"],
        ),
    ],
)
def test_what_the_assistant_says_is_trained_on_with_the_end_of_its_turn(template, text, trained):
    found = made(template)
    found.check()
    rendered = found.render(MORE)
    assert rendered.text == text and said(rendered) == trained and rendered.literal == ()
    assert found.render(MORE[:3], prompt=True).text == text[: rendered.trained[1][0]]
    only_last = found.render([MORE[0], MORE[1] | {"weight": 0}, *MORE[2:]])
    assert only_last.text == text and said(only_last) == trained[1:]


def test_the_shipped_template_is_chatml(tmp_path):
    tokenizer = Tokenizer.of(folder(tmp_path, None), template="chatml")
    tokenizer.chat_template.check()
    own, stock = tokenizer.chat_template, made(CHATML)
    assert own.render(MORE).text == stock.render(MORE).text
    assert own.render(MORE[:1], prompt=True).text == stock.render(MORE[:1], prompt=True).text
    assert said(own.render(MORE)) == ["A row.<|im_end|>", "The token, the row.<|im_end|>"]


def test_typed_control_tokens_are_told_apart_and_begin_no_turn():
    typed = "say <|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    rendered = made(CHATML).render([user(typed), {"role": "assistant", "content": "<|im_end|> ends"}])
    assert rendered.text.count(typed) == 1 and said(rendered) == ["<|im_end|> ends<|im_end|>\n"]
    spelled = [rendered.text[begin:end] for begin, end in rendered.literal]
    assert spelled == ["<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_end|>"]
    tagged = made(TAGGED).render([user("</s>"), {"role": "assistant", "content": "a</s>"}])
    assert said(tagged) == ["a</s></s>"] and len(tagged.literal) == 2
    with pytest.raises(Failure, match="noncharacter of U\\+FDD0"):
        made(CHATML).render([user("a\ufdd0b")])


def test_of_mistrals_turns_the_assistants_are_what_is_left():
    """Users, and results of tools, may follow one another; the assistant may begin, or go on."""
    pattern, begun = MISTRAL.pattern, "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT]"
    results = "[TOOL_RESULTS]1[/TOOL_RESULTS][TOOL_RESULTS]2[/TOOL_RESULTS]"
    trained = {
        "[INST] a[/INST] b</s> [INST]c[/INST] d</s>": [" b</s>", " d</s>"],
        "[INST]a[/INST][INST]b[/INST]c</s>": ["c</s>"],
        f"[INST]a[/INST][TOOL_CALLS][]</s>{results}b</s>": ["[TOOL_CALLS][]</s>", "b</s>"],
        "a</s>b</s>[AVAILABLE_TOOLS][][/AVAILABLE_TOOLS][INST]c[/INST]": ["a</s>", "b</s>"],
        f"[INST]{OPEN}</s>{CLOSE}a{OPEN}[/INST]{CLOSE}b[/INST]c{OPEN}</s>{CLOSE}d</s>": [
            f"c{OPEN}</s>{CLOSE}d</s>"
        ],
    }
    for text, said in trained.items():
        for whole in (text, begun + text):
            lead = text.startswith("a") and whole == text  # nothing stands before it
            assert [found["said"] for found in pattern.finditer(whole)] == said[lead:]


def test_templates_have_what_they_expect():
    text = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}\n"
        "    {%- set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }} {{ strftime_now('%d %b %Y') }}"
        "{{ tools | tojson(indent=1) }}{{ add_generation_prompt }}{{ missing }}\n"
    )
    found = made(text).render([user("ä<é>"), *HELLO], [{"a": 1}])
    assert found.text == '{"role": "user", "content": "ä<é>"}2 26 Jul 2024[\n {\n  "a": 1\n }\n]False'
    day = datetime.date(2026, 1, 2)
    assert made("{{ strftime_now('%Y') }}").render(HELLO, day=day).text == "2026"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ messages[0].content.nothing() }}", "'str object' has no attribute 'nothing'"),
        ("{{ messages[0] + 1 }}", "TypeError: "),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big"),
        ("{{ 'a' * 10 ** 9 }}", "OverflowError: a text repeated"),
        ("{% set n = namespace() %}{% set n.__html__ = 1 %}", "a namespace has no attribute '__html__'"),
        ("{{ namespace(_x=1) }}", "a namespace has no attribute '_x'"),
        ("{{ dict.mro() }}", "'function object' has no attribute 'mro'"),
        ("{{ 2 ** 10000 }}", "OverflowError: a power"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(template, why):
    with pytest.raises(Failure, match=re.escape(why)) as failed:
        made(template).render(HELLO)
    assert "\n" not in str(failed.value)
    with pytest.raises(InputError, match=r"chat template t\.jinja: fails at a question with its answer: "):
        made(template).check()


def test_a_template_that_loops_for_ever_ends(monkeypatch):
    # Any machine takes ten times that for the loop, which is over before another test wonders at the load.
    monkeypatch.setattr(sandbox, "SECONDS", 0.02)
    loops = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InputError, match=r"took more than 0\.02 s for one conversation; does it loop"):
        made(loops).render(HELLO)


@pytest.mark.parametrize("constant", ["'%99999d' % 1", "'a' | center(99999)"])
def test_what_a_template_is_worth_is_worked_out_within_the_time_limit(constant, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "builtins.compile", lambda source, *rest, own=compile: compiled.append(source) or own(source, *rest)
    )
    found = made(f"{{{{ {constant} }}}}{{% set b = {constant} %}}")
    assert len(compiled) == 1 and len(compiled[0]) < 10_000
    assert len(found.render(HELLO).text) == 99_999
    monkeypatch.setattr(sandbox, "LARGEST", 99_998)
    with pytest.raises(Failure, match=r"a text of more than 99,998 characters"):
        found.render(HELLO)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"t\.jinja: is no template: .*, line 1"),
        ("{% generation %}", "is no template: "),
    ],
)
def test_what_is_no_template_is_one_line(template, message):
    with pytest.raises(InputError, match=message):
        made(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHATML + " ",
            r"does not say which text is the assistant's, nor is it a known one: write {% generation",
        ),
        ("{{ messages[0].content }}", "leaves out what the assistant says; there is nothing to train on"),
        (
            "{% generation %}{% endgeneration %}{{ messages[1].content }}",
            "its {% generation %} does not hold what the assistant says",
        ),
        ("{{ bos_token }}" + "<s>" + TAGGED.removeprefix("{{ bos_token }}"), "with <s> twice; take one"),
    ],
)
def test_templates_that_cannot_be_trained_on_are_refused(template, message):
    with pytest.raises(InputError, match=re.escape(message).replace(r"\.\*", ".*")):
        made(template).check()


def test_messages_of_no_weight_need_a_turn_each():
    joined = "{% generation %}{{ messages | map(attribute='content') | join }}{% endgeneration %}"
    found = made(joined)
    found.check()
    with pytest.raises(Failure, match="of weight 0: 2 messages of the assistant, and 1 turns"):
        found.render([MORE[0], MORE[1] | {"weight": 0}, *MORE[2:]])


def test_a_folder_s_template_is_found_where_transformers_has_it(tmp_path):
    settings = {
        "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    }
    named = folder(tmp_path / "named", None)
    keys = json.loads((named / "tokenizer_config.json").read_text())
    (named / "tokenizer_config.json").write_text(json.dumps(keys | settings))
    assert Tokenizer.of(named).chat_template.text == "D"
    assert Tokenizer.of(named, template="tool_use").chat_template.text == "T"
    (named / "chat_template.jinja").write_text("J")
    assert Tokenizer.of(named).chat_template.text == "J"
    (tmp_path / "own.jinja").write_text(TAGGED)
    own = Tokenizer.of(named, template=str(tmp_path / "own.jinja"))
    assert own.chat_template.text == TAGGED and own.stop == (1,)
    assert own.kept["chat_template.jinja"] == TAGGED.encode()
    with pytest.raises(InputError, match=r"chat_template = 'tool_us'; did you mean 'tool_use'\?"):
        Tokenizer.of(named, template="tool_us").chat_template  # noqa: B018
    none = folder(tmp_path / "none", None)
    with pytest.raises(
        InputError, match=r"none: holds no chat template; name one in the mix: \[tokenizer\] ch"
    ):
        Tokenizer.of(none).chat_template  # noqa: B018
    with pytest.raises(InputError, match=r"a tokenizer\.json alone has no chat template"):
        Tokenizer.of(none / "tokenizer.json").chat_template  # noqa: B018


def test_answers_end_at_the_end_of_text_and_of_a_turn(tmp_path):
    tokenizer = Tokenizer.of(folder(tmp_path))
    assert tokenizer.chat_template.turn_end == "<|im_end|>" and tokenizer.stop == (1, 3)
    bare = Tokenizer.of(folder(tmp_path / "bare", "{{ messages[1].content }}"))
    assert bare.chat_template.turn_end is None and bare.stop == (1,)
