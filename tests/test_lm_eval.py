"""Scores on lm-eval's tasks are those of the model's own log-probabilities, and HFLM's."""

import functools
import json
import sys
import types

import numpy as np
import pytest

from jaxthru import evaluate as command
from jaxthru.runtime.errors import InputError

SEQUENCE = 32
WORDS = "the cat sat on a mat and the dog ran to the big red house by the sea"
QUESTIONS = [
    {"question": "the cat sat on a", "choices": ["mat", "dog", "sea"], "answer": 0},
    {"question": "the dog ran to the big red", "choices": ["cat", "house"], "answer": 1},
    {"question": "by the", "choices": ["sea", "mat and the dog ran"], "answer": 0},
    {"question": "the cat " * 20, "choices": ["sat", "ran"], "answer": 0},  # more than a row
]
TEXTS = [{"text": "the cat sat"}, {"text": f"{WORDS} {WORDS} {WORDS}"}]
CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 3}
"""
ROLLING = """\
task: local_texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
ANSWERS = """\
task: local_answers
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: !function answers.target
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module", autouse=True)
def apart(tmp_path_factory):
    """Data sets are cached in a folder of the tests' own, and nothing is downloaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("DISABLE_MULTIPROC", "1")
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of three tasks, whose files are named relative to it."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("answers", ANSWERS)):
        (folder / f"{name}.yaml").write_text(text)
    (folder / "answers.py").write_text("def target(doc):\n    return 'never'\n")
    return folder


def save_tokenizer(folder):
    """Writes a tokenizer that puts BOS before a text, as those of Llama do."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    keys = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder


class Standin:
    """A language model in NumPy: the next token depends on the last two and on how many there are."""

    step, longest = 7, SEQUENCE

    def __init__(self, folder):
        from jaxthru.config import DataConfig, RunConfig
        from jaxthru.data.store.tokenizer import Tokenizer

        self.tokenizer = Tokenizer.of(folder)
        self.config = RunConfig(data=DataConfig(sequence=SEQUENCE))
        self.defaults = types.SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0)
        self.stop = (self.tokenizer.end_of_text,)
        shape = 3, self.tokenizer.vocabulary, self.tokenizer.vocabulary
        self.tables = np.random.default_rng(0).normal(size=shape)
        self.shapes = set()
        self.made = 0

    def logprobs(self, tokens):
        assert 1 < len(tokens) <= SEQUENCE + 1
        previous, before, at = tokens[:-1], np.roll(tokens, 1)[:-1], np.arange(len(tokens) - 1)
        logits = sum(table[of] for table, of in zip(self.tables, (previous, before, at), strict=True))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return logprobs[at, tokens[1:]].astype(np.float32), logprobs.argmax(1) == tokens[1:]

    def scores(self, rows):
        from jaxthru.generation.generator import Scores
        from jaxthru.generation.sizes import size

        self.shapes.add((len(rows), size(max(map(len, rows)))))
        return [Scores(*self.logprobs(row)) for row in rows]

    def tokens(self, prompts, *, max_tokens, temperature, top_k, top_p, seed, stop, on_tokens):
        assert temperature == 0 and set(stop) >= set(self.stop)
        rows = [list(prompt) for prompt in prompts]
        assert max(map(len, rows)) + max_tokens <= SEQUENCE
        for until in range(1, max_tokens + 1):
            for row in rows:
                row.append(self.next(row))
            if until % 4 == 0:
                self.made = until
                pieces = [np.array(row[-4:]) for row in rows]
                if on_tokens(pieces):
                    break
        return [np.array(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]

    def next(self, row):
        found = [self.logprobs(np.array([*row, each]))[1][-1] for each in range(self.tokenizer.vocabulary)]
        return int(np.argmax(found))


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("lm_eval")
    return Standin(save_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def lm(model):
    from jaxthru.build.lm_eval_model import JaxthruLM

    return JaxthruLM(model, batch=256)


def asked(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def ended(*arguments):
    return command.main([str(argument) for argument in arguments])


def test_without_lm_eval_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert ended("nowhere", "--tasks", "x.yaml") == 2
    assert capsys.readouterr().err == "jaxthru: needs lm-eval: pip install 'jaxthru[evaluate]'\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--limit", 0), "--limit 0: must be at least 1"),
        (("--batch", 0), "--batch 0: must be at least 1"),
        (("--output", "no/such/folder.json"), "--output no/such/folder.json: must be a file in a folder"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, said):
    assert ended("nowhere", "--tasks", "x.yaml", *arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_loglikelihoods_are_the_model_s(lm, model):
    pairs = [(each["question"], f" {choice}") for each in QUESTIONS for choice in each["choices"]]
    pairs += [("", "the cat"), ("the cat  ", "sat")]
    found = lm.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        whole = model.tokenizer.encode_prompt(context + continuation)
        first = max(len(model.tokenizer.encode_prompt(context.rstrip())), 1)
        logprobs, likeliest = model.logprobs(whole[-SEQUENCE - 1 :])
        count = len(whole) - first
        np.testing.assert_allclose(total, logprobs[-count:].sum(), atol=1e-5)
        assert greedy == likeliest[-count:].all()
    assert len(model.shapes) <= 2


@pytest.mark.slow
def test_the_likeliest_continuation_is_greedy(lm, model):
    row = model.tokenizer.encode_prompt("the cat").tolist()
    most = [*row, model.next(row)]
    found = lm._loglikelihood_tokens([(None, row, most[-1:]), (None, row, [3])], disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False] and found[0][0] > found[1][0]
    with pytest.raises(InputError, match="a continuation of 33 tokens: must be at most 32"):
        lm._loglikelihood_tokens([(None, row, [3] * 33)])


@pytest.mark.slow
def test_long_texts_are_scored_token_by_token(lm, model):
    text = TEXTS[1]["text"]
    found = lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)], disable_tqdm=True)
    row = np.array([lm.prefix_token_id, *model.tokenizer.encode_prompt(text)])
    assert len(row) > 2 * SEQUENCE
    total, seen = 0.0, 1
    while seen < len(row):
        end = min(seen + SEQUENCE, len(row))
        total += model.logprobs(row[max(end - SEQUENCE - 1, 0) : end])[0][seen - end :].sum()
        seen = end
    np.testing.assert_allclose(found, [total], rtol=1e-6)


@pytest.mark.slow
def test_answers_end_at_the_first_stop_string(lm, model):
    prompt = "the cat sat on a"
    row = model.tokenizer.encode_prompt(prompt).tolist()
    for _ in range(8):
        row.append(model.next(row))
    whole = model.tokenizer.decode(row[-8:], skip_special=True)
    stops = [whole[3:5], whole[2:4], "never"]
    settings = [{"until": "never", "max_gen_toks": 8}, {"until": stops, "max_gen_toks": 8}]
    settings += [{"until": [], "max_new_tokens": 4}]
    requests = [asked("generate_until", prompt, each) for each in settings]
    found = lm.generate_until(requests, disable_tqdm=True)
    least = min(whole.find(stop) for stop in stops[:2])
    assert found == [whole, whole[:least], model.tokenizer.decode(row[-8:-4], skip_special=True)]
    lm.generate_until([asked("generate_until", prompt, {"until": whole[:1], "max_gen_toks": 8})])
    assert model.made == 4, "all rows had their stop string"
    assert lm._special("</s>") == model.tokenizer.end_of_text and lm._special("cat") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 4}, "generation_kwargs: num_beams = 4: must be 1; more is not built"),
        ({"temprature": 1}, "did you mean 'temperature'?"),
        (
            {"max_gen_toks": 32},
            "max_gen_toks = 32: must be at least 1, and leave room in the model's",
        ),
    ],
)
def test_what_cannot_be_generated_is_one_line(lm, settings, said):
    with pytest.raises(InputError) as error:
        lm.generate_until([asked("generate_until", "the", settings)])
    assert said in str(error.value)


@pytest.mark.slow
def test_the_command_prints_and_writes_scores(model, tasks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "load", lambda *_, **options: model)
    names = ",".join(str(tasks / f"{name}.yaml") for name in ("choice", "rolling", "answers"))
    output = tmp_path / "scores.json"
    assert ended("a/run", "--tasks", names, "--output", output) == 0
    said = capsys.readouterr().out
    assert "|local_choice " in said and "|local_texts " in said and "word_perplexity" in said
    found = json.loads(output.read_text())
    assert (found["model"], found["step"], found["versions"]["local_choice"]) == ("a/run", 7, 3)
    assert found["config"]["data"]["sequence"] == SEQUENCE and found["limit"] is None
    right = 0
    for each in QUESTIONS:
        totals = []
        for choice in each["choices"]:
            whole = model.tokenizer.encode_prompt(f"{each['question']} {choice}")
            count = len(whole) - len(model.tokenizer.encode_prompt(each["question"].rstrip()))
            totals.append(model.logprobs(whole[-SEQUENCE - 1 :])[0][-count:].sum())
        right += int(np.argmax(totals)) == each["answer"]
    assert found["results"]["local_choice"]["acc,none"] == right / len(QUESTIONS)
    assert found["results"]["local_answers"]["exact_match,none"] == 0
    assert ended("a/run", "--tasks", tasks / "choice.yaml", "--limit", 2, "--output", output) == 0
    assert json.loads(output.read_text())["n-samples"]["local_choice"]["effective"] == 2


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{{ message.content }}{{ ' by the ' }}{% endfor %}"
    "{% if add_generation_prompt %}sea {% endif %}"
)


@pytest.mark.slow
def test_questions_are_asked_by_the_chat_template(lm, model, tasks, monkeypatch):
    with pytest.raises(InputError, match="holds no chat template"):
        command.score(lm, command.load_tasks([str(tasks / "choice.yaml")]), chat=True)
    (model.tokenizer.path.parent / "chat_template.jinja").write_text(TEMPLATE)
    model.tokenizer = type(model.tokenizer).of(model.tokenizer.path.parent)
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "the cat"}]
    assert lm.apply_chat_template(messages) == "<s>the cat by the sea "  # as HFLM, without the system's
    prefix = [messages[1], {"role": "assistant", "content": "a mat "}]
    assert lm.apply_chat_template(prefix, add_generation_prompt=False) == "<s>the cat by the a mat"
    scored = []
    real = lm._loglikelihood_tokens
    monkeypatch.setattr(lm, "_loglikelihood_tokens", lambda asked, **how: scored.extend(asked) or real(asked))
    found = command.score(lm, command.load_tasks([str(tasks / "choice.yaml")]), limit=1, chat=True)
    contexts = {model.tokenizer.decode(context) for _, context, _ in scored}
    assert contexts == {"<s>the cat sat on a by the sea"}  # lm-eval gives the space to the answers
    assert len(scored) == 3
    assert "acc,none" in found["results"]["local_choice"]


@pytest.mark.slow
def test_tasks_that_cannot_be_loaded_are_one_line(model, tasks, tmp_path, monkeypatch):
    # Without a network a download is tried again for 23 s; with one it would succeed.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    # To list what lm-eval has takes seconds.
    offered = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(offered, "TaskManager", functools.cache(offered.TaskManager))

    def refused(word):
        with pytest.raises(InputError) as error:
            command.load_tasks([str(word)])
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refused(tmp_path / "none.yaml").endswith("none.yaml: no such file")
    assert refused(" , ").startswith("no task: give --tasks")
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: [")
    assert "broken.yaml: cannot be loaded" in refused(broken)
    broken.write_text(CHOICE.replace("questions.jsonl", "nothing.jsonl"))
    assert "cannot be loaded (FileNotFoundError" in refused(broken)
    assert "did you mean 'hellaswag'?" in refused("helaswag")
    assert "its documents are downloaded" in refused("hellaswag")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of PyTorch's and transformers'
def test_it_scores_as_hflm_does(tasks, tmp_path):
    """A random Llama in float32, from the same folder."""
    pytest.importorskip("lm_eval")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from jaxthru.build.language_model import load
    from jaxthru.build.lm_eval_model import JaxthruLM

    folder = save_tokenizer(tmp_path / "folder")
    model = load(random_llama(torch, transformers, folder))
    words = [str(tasks / f"{name}.yaml") for name in ("choice", "rolling")]
    ours = JaxthruLM(model, batch=512)
    theirs = HFLM(str(folder), dtype="float32", device="cpu", batch_size=2, max_length=ours.max_length)
    found, wanted = (command.score(lm, command.load_tasks(words))["results"] for lm in (ours, theirs))
    for task, metrics in wanted.items():
        for name, value in metrics.items():
            same = value == found[task][name] or abs(found[task][name] - value) <= 1e-3 * abs(value)
            assert same, f"{task} {name}: {found[task][name]}, of HFLM {value}"
    pairs = [(each["question"], f" {choice}") for each in QUESTIONS for choice in each["choices"]]
    pairs += [("", "the cat"), ("<s>the cat ", "sat")]
    requests = [asked("loglikelihood", *pair) for pair in pairs]
    for (ours_total, ours_greedy), (total, greedy) in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
    ):
        assert abs(ours_total - total) <= 1e-3 and ours_greedy == greedy
    requests = [asked("loglikelihood_rolling", each["text"]) for each in TEXTS]
    np.testing.assert_allclose(
        ours.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests), rtol=0, atol=1e-3
    )
    for settings in ({"until": ["a"], "max_gen_toks": 12}, {"until": [], "max_gen_toks": 12}):
        requests = [asked("generate_until", each["question"], settings) for each in QUESTIONS[:3]]
        assert ours.generate_until(requests) == theirs.generate_until(requests)


def random_llama(torch, transformers, folder):
    """Saves a Llama of random weights beside a tokenizer; returns the folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2 * SEQUENCE}
    ids = {"vocab_size": 280, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    config = transformers.LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
