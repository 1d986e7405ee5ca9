"""What the family moe has been published as: model types mixtral, qwen3_moe and olmoe.

A folder has each expert's matrices as tensors of their own, or, as transformers 5 keeps them in memory,
those of all experts of a layer as one, with gates and ups behind each other. Both are read; the former is
written.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxthru.models.llama_published import FEED_FORWARD, attention, decoder, decoder_written, with_ends
from jaxthru.models.published import Published, Tensor, layer_tensors, refuse, size_of, value_of
from jaxthru.runtime.errors import require

MIXTRAL, QWEN3, OLMOE = "mixtral", "qwen3_moe", "olmoe"
ABSENT = {
    MIXTRAL: {
        **{"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131_072},
        **{"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
        **{"intermediate_size": 14_336, "experts": 8, "num_experts_per_tok": 2},
    },
    QWEN3: {
        **{"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32_768},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "experts": 128, "num_experts_per_tok": 8},
    },
    OLMOE: {
        **{"vocab_size": 50_304, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
        **{"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 4096},
        **{"rms_norm_eps": 1e-5},
        **{"intermediate_size": 2048, "experts": 64, "num_experts_per_tok": 8},
    },
}
"""Of each model type, what a key means that is absent. `experts`: under either of its names."""

CLASSES = {MIXTRAL: "MixtralForCausalLM", QWEN3: "Qwen3MoeForCausalLM", OLMOE: "OlmoeForCausalLM"}
COUNTS = ("num_local_experts", "num_experts")
"""Names of the key that counts experts: the class of one model type reads the other's, too."""
BUILT = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "router_jitter_noise": (0, 0.0),
    "clip_qkv": (),
    "decoder_sparse_step": (1,),
    "use_sliding_window": (False,),
    "is_causal": (True,),
}


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of `Config`, see `Published`."""
    kind = raw["model_type"]
    absent = ABSENT[kind]
    refuse(raw, BUILT)
    found = decoder(raw, absent)
    width = size_of(raw, "intermediate_size", absent["intermediate_size"])
    counts = {name: size_of(raw, name, None) for name in COUNTS if raw.get(name) is not None}
    said = " and ".join(f"{name} = {count}" for name, count in counts.items())
    require(len({*counts.values()}) <= 1, f"{said}: contradict each other")
    found |= {
        "experts": next(iter(counts.values()), absent["experts"]),
        "top_k": size_of(raw, "num_experts_per_tok", absent["num_experts_per_tok"]),
        "expert_mlp": width,
    }
    if kind == MIXTRAL:
        window = size_of(raw, "sliding_window", None)
        return found | {"score": "softmax_of_chosen", "normalise": True, "window": window}
    found |= {"qk_norm": True, "normalise": value_of(raw, "norm_topk_prob", bool, False)}
    if kind == OLMOE:
        return found | {"qk_norm_together": True}
    expert_mlp = size_of(raw, "moe_intermediate_size", absent["moe_intermediate_size"])
    return found | {"mlp": width, "expert_mlp": expert_mlp, "dense_first": _dense_first(raw)}


def _dense_first(raw: Mapping[str, Any]) -> int:
    dense = raw.get("mlp_only_layers") or []
    first = isinstance(dense, list) and dense == [*range(len(dense))]
    require(
        first, lambda: f"mlp_only_layers = {dense!r}: is not built unless it is the first layers, [0, 1, ...]"
    )
    return len(dense)


def kind_of(config: Any) -> str:
    """Returns the model type that a configuration is published as. Raises InputError where none is."""
    kind = OLMOE if config.qk_norm_together else QWEN3 if config.qk_norm else MIXTRAL
    plain = {
        **{"qkv_bias": False, "shared_mlp": 0, "routed_scale": 1.0, "bias_rate": 0.0},
        "top_groups": config.expert_groups,
    }
    for name, value in plain.items():
        is_plain = getattr(config, name) == value
        _require(is_plain, config, name, f"no published model type has it; {value} would be")
    _require(config.score != "sigmoid", config, "score", "published model types have a softmax")
    if kind != QWEN3:
        _require(
            config.dense_first == 0, config, "dense_first", f"model type {kind} has experts in each layer"
        )
    if kind == MIXTRAL:
        _require(normalised(config), config, "normalise", f"model type {kind} always does")
        all_of_them = config.window is None or config.window_from == 0
        _require(all_of_them, config, "window_from", f"model type {kind} has a window in all layers or none")
    else:
        _require(config.windowed_layers == 0, config, "window", f"model type {kind} has none")
    if kind == OLMOE:
        wide = config.embed == config.heads * config.head_dim
        _require(wide, config, "head_dim", f"model type {kind} has hidden_size ÷ num_attention_heads")
    return kind


def _require(condition: bool, config: Any, name: str, why: str) -> None:
    require(condition, f"model.{name} = {getattr(config, name)!r}: {why}")


def normalised(config: Any) -> bool:
    """Says whether a token's weights add up to 1, as those of a softmax of the chosen do in any case."""
    return config.normalise or config.score == "softmax_of_chosen"


def write(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json, see `Published`. Raises InputError for a shape that no published model
    type has."""
    kind = kind_of(config)
    own: dict[str, Any] = {"sliding_window": config.window, "num_local_experts": config.experts}
    if kind != MIXTRAL:
        own = {"num_experts": config.experts, "norm_topk_prob": normalised(config), "attention_bias": False}
    if kind == QWEN3:
        own |= {"moe_intermediate_size": config.expert_mlp, "decoder_sparse_step": 1}
        own |= {"mlp_only_layers": [*range(config.dense_first)], "use_sliding_window": False}
    if kind == OLMOE:
        own |= {"clip_qkv": None}
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "intermediate_size": config.mlp if kind == QWEN3 else config.expert_mlp,
        "num_experts_per_tok": config.top_k,
        **decoder_written(config),
        **own,
    }


def tensors(config: Any) -> Iterator[Tensor]:
    """Yields all published tensors, see `Published`: of each expert its own."""
    if kind_of(config) == MIXTRAL:
        place, (gate, up, down) = "block_sparse_moe", ("w1", "w3", "w2")
    else:
        place, (gate, up, down) = "mlp", ("gate_proj", "up_proj", "down_proj")

    def experts(prefix: str, path: tuple[str, ...]) -> Iterator[Tensor]:
        for expert in range(config.experts):
            of = f"{prefix}.experts.{expert}"
            for side, name in enumerate((gate, up)):
                yield Tensor(f"{of}.{name}.weight", (*path, "gate_up"), True, ((0, expert), (2, side)))
            yield Tensor(f"{of}.{down}.weight", (*path, "down"), True, ((0, expert),))

    return with_ends(config, _layers(config, place, experts))


def fused_tensors(config: Any) -> Iterator[Tensor]:
    """Yields them as transformers 5 keeps them in memory: those of all experts of a layer as one."""

    def experts(prefix: str, path: tuple[str, ...]) -> Iterator[Tensor]:
        yield Tensor(f"{prefix}.experts.gate_up_proj", (*path, "gate_up"), True)
        yield Tensor(f"{prefix}.experts.down_proj", (*path, "down"), True)

    return with_ends(config, _layers(config, "mlp", experts))


def _layers(config: Any, place: str, experts: Any) -> Iterator[Tensor]:
    """Yields the tensors of all layers. place: of the experts in a layer. experts: (its name, its path) ->
    those of the experts."""
    table = attention(config)
    for layer in range(config.layers):
        dense = layer < config.dense_first
        yield from layer_tensors(layer, table | (FEED_FORWARD if dense else {}))
        if not dense:
            prefix, path = f"model.layers.{layer}.{place}", ("layers", str(layer), "mlp")
            yield Tensor(f"{prefix}.gate.weight", (*path, "router", "weight"), True)
            yield from experts(prefix, path)


PUBLISHED = Published(tuple(ABSENT), read, write, tensors, others=(fused_tensors,))
