"""config.json both ways: as transformers reads it, in the keys of version 4 and of 5, and every refusal."""

import copy
import json
import math

import pytest

from jaxthru.huggingface.config import model_config, read_config, written
from jaxthru.models import family, gemma, llama
from jaxthru.models.family import FamilyConfig
from jaxthru.models.rotary import RopeScaling
from jaxthru.runtime.errors import InputError

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"rope_type": "llama3", "original_max_position_embeddings": 8192},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
FILES = {
    "llama 3.1": {"model_type": "llama", **TINY, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama, of version 5": {"model_type": "llama", **TINY, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    "llama, both": {
        **{"model_type": "llama", **TINY, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        "rope_parameters": {"rope_theta": 5e5, **LLAMA3},
    },
    "smollm": {"model_type": "llama", **TINY, "tie_word_embeddings": True, "rope_theta": 1e4},
    "old type": {"model_type": "llama", **TINY, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "no keys": {"model_type": "llama"},
    "mistral 0.1": {"model_type": "mistral", **TINY},
    "mistral 0.3": {"model_type": "mistral", **TINY, "sliding_window": None, "rope_theta": 1e6},
    "mistral, no keys": {"model_type": "mistral"},
    "qwen2.5": {
        **{"model_type": "qwen2", **TINY, "rope_theta": 1e6, "use_sliding_window": False},
        **{"sliding_window": 131072, "max_window_layers": 21, "tie_word_embeddings": True},
    },
    "qwen2, window": {
        **{"model_type": "qwen2", **TINY, "use_sliding_window": True, "sliding_window": 16},
        "max_window_layers": 3,
    },
    "qwen2, kinds": {
        **{"model_type": "qwen2", **TINY, "use_sliding_window": True, "sliding_window": 16},
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
    },
    "qwen2, no keys": {"model_type": "qwen2"},
    "qwen2, yarn": {"model_type": "qwen2", **TINY, "rope_theta": 1e6, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", **TINY, "rope_theta": 1e6},
    "qwen3, head": {"model_type": "qwen3", **TINY, "head_dim": 32},
    "gemma, no keys": {"model_type": "gemma3_text"},
    "gemma 1b": {
        **{
            "model_type": "gemma3_text",
            **TINY,
            "head_dim": 32,
            "sliding_window": 16,
            "max_position_embeddings": 64,
        },
        **{"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 3},
    },
    "gemma 4b": {
        **{"model_type": "gemma3_text", **TINY, "query_pre_attn_scalar": 168, "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma, of version 5": {
        **{"model_type": "gemma3_text", **TINY},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": LOCAL,
        },
    },
    "gemma, kinds": {
        **{"model_type": "gemma3_text", **TINY},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma, untied": {"model_type": "gemma3_text", **TINY, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def oracle():
    import transformers

    def read(raw: dict) -> dict:
        return transformers.AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()

    return read


def assert_agrees(config: FamilyConfig, found: dict) -> None:
    """Fails unless a configuration is what transformers made of the same keys."""
    same = {
        **{"vocabulary": "vocab_size", "layers": "num_hidden_layers", "embed": "hidden_size"},
        **{"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "mlp": "intermediate_size"},
        **{"max_sequence": "max_position_embeddings", "norm_epsilon": "rms_norm_eps"},
        "tied_embeddings": "tie_word_embeddings",
    }
    for ours, theirs in same.items():
        assert getattr(config, ours) == found[theirs], ours
    head = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    assert config.head_dim == head
    rope, kinds = found["rope_parameters"], found.get("layer_types")
    windows = [found.get("sliding_window")] * config.layers
    if kinds is not None:
        windows = [found["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    if isinstance(config, gemma.Config):
        assert config.query_scalar == found["query_pre_attn_scalar"]
        assert config.rope_local_theta == rope["sliding_attention"]["rope_theta"]
        assert config.rope_theta == rope["full_attention"]["rope_theta"]
        assert config.rope_factor == rope["full_attention"].get("factor", 1)
        every = config.global_every
        assert windows == [config.window if (i + 1) % every else None for i in range(config.layers)]
        return
    assert config.rope_theta == rope["rope_theta"]
    assert (config.rope_scaling.kind if config.rope_scaling else "default") == rope["rope_type"]
    if config.rope_scaling:
        assert config.rope_scaling.factor == rope["factor"]
    if config.rope_scaling and config.rope_scaling.kind != "linear":
        assert config.rope_scaling.original_sequence == rope["original_max_position_embeddings"]
    assert windows == [config.window if i >= config.window_from else None for i in range(config.layers)]


@pytest.mark.parametrize("name", FILES)
def test_it_is_read_as_transformers_reads_it(name, oracle):
    config = model_config(FILES[name], "config.json")
    assert_agrees(config, oracle(FILES[name]))


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_what_was_read(name, oracle):
    """By us, by transformers, and without the keys that only one of its versions knows."""
    config = model_config(FILES[name], "config.json")
    own = json.loads(json.dumps(written(config, "bfloat16", None)))
    if name != "mistral 0.3":  # of the shape of a Llama
        assert own["model_type"] == FILES[name]["model_type"]
    old = {key: value for key, value in own.items() if key != "rope_parameters"}
    later = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    new = {key: value for key, value in own.items() if key not in later}
    for raw in (own, old, new):
        assert family.published(config).write(model_config(raw, "x")) == family.published(config).write(
            config
        )
        assert_agrees(config, oracle(raw))


@pytest.mark.parametrize("name", FILES)
def test_a_source_s_keys_are_carried_through(name):
    source = FILES[name] | {"bos_token_id": 1, "eos_token_id": [2, 7], "of_a_later_version": {"a": [1]}}
    source["torch_dtype"] = "bfloat16"
    config = model_config(source, "config.json")
    found = written(config, "bfloat16", source)
    assert {key: found[key] for key in source} == source
    assert found["dtype"] == "bfloat16" and "rope_parameters" in found
    assert model_config(found, "x") == config


def test_a_changed_shape_is_written_over_its_source():
    source = FILES["mistral 0.1"] | {"eos_token_id": 2}
    config = model_config(source, "x")
    longer = llama.Config(**{**vars(config), "max_sequence": 77, "rope_theta": 2e4})
    found = written(longer, "float32", source)
    assert (found["model_type"], found["eos_token_id"], found["torch_dtype"]) == ("mistral", 2, "float32")
    assert model_config(found, "x") == longer
    full = llama.Config(**{**vars(config), "window": None})
    assert model_config(written(full, "float32", source), "x") == full
    normed = llama.Config(**{**vars(config), "qk_norm": True, "window": None})
    found = written(normed, "float32", source)
    assert found["model_type"] == "qwen3" and model_config(found, "x") == normed


def test_every_scaling_is_written_as_it_is_read():
    for scaling in (
        RopeScaling(
            kind="yarn", factor=2.0, beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=1.5
        ),
        RopeScaling(kind="linear", factor=3.0),
        RopeScaling(factor=32.0, original_sequence=4096),
    ):
        config = llama.Config(rope_scaling=scaling)
        assert model_config(written(config, "float32", None), "x").rope_scaling.amplitude == scaling.amplitude
        found = model_config(written(config, "float32", None), "x").rope_scaling
        if scaling.kind != "linear":
            assert found == scaling
        assert (found.kind, found.factor) == (scaling.kind, scaling.factor)


def test_yarn_s_amplitude_is_the_ratio_of_two_scales():
    rope = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    found = model_config({**FILES["qwen2, yarn"], "rope_scaling": rope}, "x").rope_scaling
    assert found.amplitude == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    found = model_config(FILES["qwen2, yarn"], "x").rope_scaling
    assert found.amplitude == pytest.approx(0.1 * math.log(4) + 1)


REFUSED = [
    ({"model_type": "qwen33"}, "did you mean 'qwen3'?"),
    ({"model_type": None}, "model_type is missing"),
    ({"model_type": 3}, "model_type = 3: must be str"),
    ({"model_type": "gemma2"}, "Gemma 2 is not built"),
    ({"model_type": "gemma3"}, "gemma3_text"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': is not built; built: 'silu'"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"pretraining_tp": 2}, "pretraining_tp = 2"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: is not built; must be null"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type = 'dynamic'"),
    ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type = 'longrope'"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type = 'proportional'"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope'"),
    ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_scaling.mrope_section"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        "rope_scaling.factor = 0.5: must be at least 1",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor = '2': must be float"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "contradict each other"),
    ({"rope_scaling": [8]}, "rope_scaling = [8]: must be a group of keys"),
    (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        "rope_theta and rope_parameters.rope_theta",
    ),
    ({"rope_scaling": None, "rope_parameters": LLAMA3}, "rope_scaling and rope_parameters contradict"),
    ({"rope_theta": 0}, "rope_theta = 0.0: must be above 0"),
    ({"rope_theta": float("inf")}, "rope_theta = inf: must be finite"),
    ({"sliding_window": 4096}, "sliding_window = 4096: model_type 'llama' has none"),
    ({"hidden_size": "64"}, "hidden_size = '64': must be int"),
    ({"hidden_size": True}, "hidden_size = True: must be int"),
    ({"hidden_size": 65}, "hidden_size = 65: is no multiple of num_attention_heads = 4"),
    ({"hidden_size": 10**30}, "hidden_size: is too large a number"),
    ({"num_attention_heads": 0}, "num_attention_heads = 0: must be from 1"),
    ({"num_key_value_heads": 3}, "must be a multiple"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be from 1 to 10000"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes': must be bool"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types: has 3 entries"),
    ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not built"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false"),
    (
        {
            **{"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "full_attention behind sliding_attention",
    ),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "all layers have the window"),
    ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window is null"),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {**YARN, "rope_theta": 1e4}}},
        "rope_parameters.sliding_attention.rope_type = 'yarn'",
    ),
    (
        {
            "model_type": "gemma3_text",
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
        },
        "layer_types: is not built",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[said[:50] for _, said in REFUSED])
def test_what_is_not_built_is_refused_by_its_name(change, said):
    with pytest.raises(InputError) as error:
        model_config({"model_type": "llama", **TINY} | change, "folder/config.json")
    line = str(error.value)
    assert line.startswith("folder/config.json: ") and said in line and "\n" not in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("", "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "is no JSON"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps = nan: must be finite"),
        ("[" * 100_000, "is no JSON"),
        ('{"model_type": "\xff"}'.encode("latin-1"), "is no JSON"),
    ],
    ids=range(7),
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value) and said in str(error.value)


def test_dropout_is_said_once_and_goes_on(caplog):
    with caplog.at_level("WARNING"):
        model_config({"model_type": "llama", **TINY, "attention_dropout": 0.1}, "config.json")
    assert [record.message for record in caplog.records] == [
        "config.json: attention_dropout = 0.1: is not applied"
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_weight_is_one_published_tensor(name):
    config = model_config(FILES[name] | TINY, "config.json")
    chain = family.chain(config)
    weights = {("embedding", *path) for path in paths(chain.embedding.weights)}
    weights |= {("head", *path) for path in paths(chain.head.weights)}
    for index, stage in enumerate(chain.layers):
        weights |= {("layers", str(index), *path) for path in paths(stage.weights)}
    tensors = list(family.published(config).tensors(config))
    assert {tensor.path for tensor in tensors} == weights and len(tensors) == len(weights)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert ("lm_head.weight" in {tensor.name for tensor in tensors}) != config.tied_embeddings


def paths(tree, before=()):
    if not isinstance(tree, dict):
        return [before]
    return [path for name, below in tree.items() for path in paths(below, (*before, name))]
