"""A conversation in the terminal: each line is answered as the template says, by what whole passes say."""

import io
import shutil

import pytest
from published import folder_of, make_site, uncached

import jaxthru
from jaxthru.build.conversation import Conversation
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.generate import main
from jaxthru.runtime.errors import InputError
from jaxthru.training.evaluate import EvaluateConfig
from jaxthru.training.samples import Samples

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}: "
    "{% generation %}{{ message.content + '<pad>' }}{% endgeneration %}"
    "{% elif message.role == 'system' and message.content == 'no' %}{{ raise_exception('no system') }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def folder(site):
    made = folder_of(site.path, "smollm")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def model(folder):
    return jaxthru.load(folder)


def said(capsys, monkeypatch, words: str, *arguments) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(words))
    assert main([*map(str, arguments), "--chat", "--temperature", "0", "--max-tokens", "8"]) == 0
    return capsys.readouterr().out


def test_each_line_is_answered_with_what_was_said_before(folder, model, capsys, monkeypatch):
    first = uncached(model, "<s>the cat: ", 8, model.tokenizer.stop)
    second = uncached(model, f"<s>the cat: {first}<pad>a dog: ", 8, model.tokenizer.stop)
    told = uncached(model, "<s>be good the cat: ", 8, model.tokenizer.stop)
    assert any((first, second)) and told != first
    lines = "the cat\n\na dog\n/new\nthe cat\n/exit\nthe cat\n"
    assert said(capsys, monkeypatch, lines, folder) == f"{first}\n{second}\n{first}\n"
    assert said(capsys, monkeypatch, "the cat\n", folder, "--system", "be good ") == f"{told}\n"
    assert said(capsys, monkeypatch, "", folder) == ""


def test_answers_come_in_pieces_and_end_at_the_end_of_a_turn(model):
    pieces = []
    conversation = Conversation.of(model, temperature=0, max_tokens=20)
    text = conversation.answer("a big red house", pieces.append)
    assert "".join(pieces) == text and len(pieces) > 1
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    assert model.tokenizer.chat_template.turn_end == "<pad>"
    assert {*model.tokenizer.stop} == {model.tokenizer.end_of_text, 0} and 0 not in model.stop
    typed = [{"role": "user", "content": "a</s>"}]
    ids = model.tokenizer.encode_conversation(typed).tolist()
    assert model.tokenizer.end_of_text not in ids and ids[0] == model.tokenizer.bos


def test_a_conversation_that_is_refused_is_forgotten(folder, model, capsys, monkeypatch):
    conversation = Conversation.of(model, "no", temperature=0)
    with pytest.raises(InputError, match=r"chat_template\.jinja: no system"):
        conversation.answer("the cat")
    assert conversation.messages == [{"role": "system", "content": "no"}]
    long = Conversation.of(model, temperature=0)
    with pytest.raises(InputError, match=r"tokens fill the model's context of \d+: begin a new one"):
        long.answer("a " * model.longest)
    assert long.messages == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat", "--prompt", "a"], "--chat: reads what you say from standard input; leave out --prompt"),
        (["--prompt", "a", "--system", "b"], "--system: is of a conversation; add --chat"),
        (["--chat", "--system", "no"], "chat_template.jinja: no system"),
    ],
)
def test_a_mistake_is_one_line(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert main([str(folder), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_model_without_a_template_does_not_talk(folder, tmp_path, capsys, monkeypatch):
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([str(bare), "--chat"]) == 2
    assert "holds no chat template" in capsys.readouterr().err


def test_a_run_of_conversations_asks_its_prompts(folder):
    config = EvaluateConfig(prompts=("the cat",), max_tokens=4)
    talks = Tokenizer.of(folder, talks=True)
    (ids,) = Samples(config, None, talks, None, 0)._prompts
    assert ids.tolist() == talks.encode_prompt("<s>the cat: ").tolist()
    (ids,) = Samples(config, None, Tokenizer.of(folder), None, 0)._prompts
    assert ids.tolist() == talks.encode_prompt("the cat").tolist()
