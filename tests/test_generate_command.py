"""The command that makes text, on a run and on a folder, and a loaded model in Python."""

import functools
import io
import json
import sys

import jax
import numpy as np
import pytest
from published import change_json, folder_of, make_site, only, save_tokenizer, uncached

import jaxthru
from jaxthru.generate import main, parse_arguments, prompts_of
from jaxthru.huggingface.weights import Weights
from jaxthru.runtime.errors import InputError
from jaxthru.train import run
from jaxthru.training.saved import SavedParameters

GREEDY = "--temperature", "0", "--max-tokens", "10"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = make_site(tmp_path_factory.mktemp("site"))
    folder_of(made.path, "smollm")
    return made


@pytest.fixture(scope="module")
def folder(site):
    return site.path / "smollm"


@pytest.fixture(scope="module")
def model(folder):
    return jaxthru.load(folder)


@pytest.fixture(scope="module")
def trained(site, folder):
    """A run on eight devices that has learnt something."""
    settings = "train.steps=2", "checkpoint.every=1", "optim.learning_rate=1e-2", "optim.warmup_ratio=0"
    config = site.config(f"model.pretrained={folder}", "mesh.fsdp=4", "mesh.tensor=2", *settings)
    return run(config, site.path / "run")


def said(capsys, *words) -> str:
    """Returns what the command prints."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words) -> str:
    """Returns the line with which the command ends, bad input's."""
    assert main([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("jaxthru: ")


def test_a_folders_text_is_that_of_whole_passes(folder, model, capsys):
    prompts = ["the cat", "a dog ran to the big red house"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    texts = [uncached(model, prompt, 10) for prompt in prompts]
    expected = "\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)) + "\n"
    assert any(texts) and said(capsys, folder, *words, *GREEDY) == expected


def test_a_runs_text_is_that_of_whole_passes_on_one_device_or_its_mesh(trained, folder, capsys):
    found = jaxthru.load(trained)
    text = uncached(found, "the cat", 10)
    assert found.step == 2 and repr(found).startswith("<llama: 17,256 parameters of step 2>")
    assert said(capsys, trained.path, "--prompt", "the cat", *GREEDY) == f"the cat{text}\n"
    meshed = ("--set", "mesh.fsdp=4", "--set", "mesh.tensor=2")
    assert said(capsys, f"{trained.path}/", "--prompt", "the cat", *GREEDY, *meshed) == f"the cat{text}\n"
    first = jaxthru.load(trained, step=1)
    assert first.step == 1 and np.abs(first.logits([1, 9]) - found.logits([1, 9])).max() > 1e-4


def test_prompts_come_from_a_file_or_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\r\n\n two \nthrée".encode())
    at = lambda *words: prompts_of(parse_arguments(["MODEL", *words]))  # noqa: E731
    assert at("--prompt", "zero", "--file", str(file)) == ["zero", "one", " two ", "thrée"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert at("--file", "-") == ["a", "b"]
    for content, words in ((b"\xff", "cannot be read as text"), (b"\n\n", "no prompt")):
        file.write_bytes(content)
        with pytest.raises(InputError, match=words):
            at("--file", str(file))


def test_samples_repeat_by_seed_and_the_folder_says_how_to_draw(site, model, capsys):
    other = folder_of(site.path / "text", "smollm")
    change_json(other / "generation_config.json", do_sample=True, temperature=3.0, top_k=40, top_p=0.9)
    own = {"temperature": 3.0, "top_k": 40, "top_p": 0.9}
    made = jaxthru.load(other)
    assert {name: getattr(made.defaults, name) for name in own} == own
    words = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", value)]
    asked = site.path / "smollm", "--prompt", "the cat", "--max-tokens", "10", "--seed", "3"
    drawn = said(capsys, *asked, *words).removeprefix("the cat").removesuffix("\n")
    draw = functools.partial(made.generate, "the cat", max_tokens=10)
    assert drawn == draw(seed=3) != draw(seed=4)
    greedy = model.generate("the cat", max_tokens=10)
    assert greedy == draw(temperature=0.0) == draw(top_k=1)


def test_each_of_several_stop_tokens_ends_a_text(site, model):
    """As the files of Llama 3 have them."""
    whole = model.tokens(["a dog ran to the big red house"], max_tokens=12)[0].tolist()
    stop = whole[3]
    other = folder_of(site.path / "store", "smollm")
    change_json(other / "generation_config.json", eos_token_id=[2, stop])
    changed = jaxthru.load(other)
    assert changed.stop == (2, stop)
    (found,) = changed.tokens(["a dog ran to the big red house"], max_tokens=12)
    assert found.tolist() == whole[: whole.index(stop)]
    (given,) = model.tokens(["a dog ran to the big red house"], max_tokens=12, stop=[2, stop])
    assert given.tolist() == found.tolist()


def test_what_cannot_be_continued_is_said_before_weights_are_read(site, trained, folder, capsys, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "array", refuse)
    monkeypatch.setattr(SavedParameters, "restore", refuse)
    long = "--max-tokens", "90", "--prompt", "the cat sat"
    for where in (folder, trained.path):
        begun = 12
        expected = (
            f"prompt 1: {begun} tokens and max_tokens = 90 are 102: more than the model's context of 96"
        )
        assert refused(capsys, where, *long) == expected
        for name, value in (
            ("max-tokens", 0),
            ("temperature", -1),
            ("top-k", -1),
            ("top-p", 0),
            ("seed", -1),
        ):
            line = refused(capsys, where, "--prompt", "a", f"--{name}", value)
            assert line.startswith(f"{name.replace('-', '_')} = {value}")
    assert refused(capsys, folder).startswith("no prompt: give --prompt TEXT")
    assert "no such folder; give a run directory" in refused(capsys, site.path / "none", "--prompt", "a")
    assert "config.json: there is no such file" in refused(capsys, site.path / "text", "--prompt", "a")
    assert "there are 1, 2" in refused(capsys, trained.path, "--prompt", "a", "--step", 7)
    assert "has no steps" in refused(capsys, folder, "--prompt", "a", "--step", 7)
    assert "unknown key modle.layers" in refused(capsys, folder, "--prompt", "a", "--set", "modle.layers=2")
    assert "mesh.data=1, fsdp=3" in refused(capsys, folder, "--prompt", "a", "--set", "mesh.fsdp=3")


def test_a_prompt_of_no_text_is_continued_where_texts_begin_with_a_token(site, model):
    assert model.encode("").tolist() == [1] and isinstance(model.generate("", max_tokens=4), str)
    assert model.encode("<s>a").tolist() == model.encode("a").tolist()
    other = folder_of(site.path / "store", "qwen2")
    with pytest.raises(InputError, match="prompt 1: has no tokens"):
        jaxthru.load(other).generate("")


def test_a_loaded_model_in_python(model, folder):
    assert repr(model).startswith("<llama: 17,256 parameters of published weights>")
    assert (model.step, model.longest, model.config.model.embed) == (None, 96, 24)
    table = model.params["embedding"]["table"]
    assert table.shape == (64, 24) and table.dtype == np.float32
    one = model.logits(np.array([1, 5, 9, 7]))
    assert one.shape == (4, 64) and one.dtype == np.float32
    both = model.logits([[1, 5, 9, 7], [1, 6, 9, 8]])
    np.testing.assert_allclose(both[0], one, atol=1e-5)
    texts = ["the cat sat on a mat", "a dog"]
    rows = [model.encode(text) for text in texts]
    logprobs = [model.logprobs(row)[0] for row in rows]
    loss = model.loss(texts)
    assert loss == pytest.approx(-np.concatenate(logprobs).mean(), rel=1e-6)
    losses = []
    for row in rows:  # cross-entropy in NumPy
        logits = model.logits(row)[:-1].astype(np.float64)
        losses += list(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(row) - 1), row[1:]])
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert isinstance(model.generate(model.encode("the cat").tolist(), max_tokens=3), str)
    assert model.generate([], max_tokens=3) == []
    for wrong, words in (
        ([], "has no tokens"),
        ([1, 64], "id 64 is not in the vocabulary"),
        ([0] * 97, "97"),
    ):
        with pytest.raises(InputError, match=words):
            model.logits(wrong)
    with pytest.raises(InputError, match="no token that another stands before"):
        model.loss("")


def test_a_prompt_too_long_for_samples_is_one_line_before_compiling(site, folder, monkeypatch):
    only(monkeypatch, 1)
    config = site.config(f"model.pretrained={folder}", f"evaluate.prompts={'a' * 40}")
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(InputError, match=r"evaluate.prompts: 'aaa.*41 tokens and max_tokens = 64 are 105"):
        run(config, site.path / "refused")


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('["a", "b, c"]', ("a", "b, c")),
        ("The ", ("The",)),
        ("def main(", ("def main(",)),
        ("[]", ()),
        ("", ()),
    ],
)
def test_prompts_are_set_as_a_list_or_one_text(site, text, prompts):
    assert site.config(f"evaluate.prompts={text}").evaluate.prompts == prompts


@pytest.mark.parametrize("text", ["[a]", '["a", 1]', '["a"', '["a", ""]'])
def test_prompts_that_are_none_are_one_line(site, text):
    with pytest.raises(InputError, match=r"^evaluate\.prompts") as found:
        site.config(f"evaluate.prompts={text}")
    assert "\n" not in str(found.value)


@pytest.mark.slow
def test_from_a_run_whose_state_was_in_host_memory(site, folder, capsys):
    settings = "offload.level=parameters", "model.loop=unroll", "remat.policy=attention"
    with pytest.MonkeyPatch.context() as patch:
        only(patch, 1)
        made = run(site.config(f"model.pretrained={folder}", *settings), site.path / "offloaded")
    capsys.readouterr()
    words = "--prompt", "the cat", *GREEDY
    assert said(capsys, made.path, *words) == said(capsys, folder, *words)


@pytest.mark.slow
def test_a_folder_with_a_copy_of_its_tied_head_and_in_bfloat16(site, folder, model):
    other = folder_of(site.path / "text" / "..", "qwen2")
    head = jaxthru.load(other).logits([5, 9])
    whole = (other / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    table = header["model.embed_tokens.weight"]
    first, last = table["data_offsets"]
    header["lm_head.weight"] = table | {"data_offsets": [len(data), len(data) + last - first]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    content = len(packed).to_bytes(8, "little") + packed + data + data[first:last]
    (other / "model.safetensors").write_bytes(content)
    np.testing.assert_array_equal(jaxthru.load(other).logits([5, 9]), head)
    half = jaxthru.load(folder, ["precision.compute=bfloat16"])
    assert half.params["embedding"]["table"].dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(half.logits([1, 5, 9]), model.logits([1, 5, 9]), atol=0.05)


@pytest.mark.slow
def test_a_run_with_another_tokenizer_keeps_its_own(site, folder):
    save_tokenizer(site.path / "own", "qwen2")
    with pytest.MonkeyPatch.context() as patch:
        only(patch, 1)
        settings = f"model.pretrained={folder}", f"data.tokenizer={site.path / 'own'}"
        made = run(site.config(*settings), site.path / "retokenised")
    assert jaxthru.load(made).tokenizer.borders.bos == ""
