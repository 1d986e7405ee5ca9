"""What the family gemma has been published as: model type gemma3_text."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxthru.models import published_rope
from jaxthru.models.published import (
    Published,
    Tensor,
    kinds_of_layers,
    layer_kinds,
    layer_tensors,
    refuse,
    size_of,
    value_of,
)
from jaxthru.models.rotary import RopeScaling
from jaxthru.runtime.errors import InputError, require

ABSENT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
"""What a key means that is absent: files hold what differs from the class's default."""

BUILT = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PATTERN = 6


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of `Config`, see `Published`."""
    refuse(raw, BUILT)
    layers = size_of(raw, "num_hidden_layers", ABSENT["num_hidden_layers"], 10_000)
    size = {name: size_of(raw, name, default) for name, default in ABSENT.items()}
    every, windowed = _global_every(raw, layers)
    null = "sliding_window" in raw and raw["sliding_window"] is None
    require(not (null and windowed), "sliding_window is null, but some layers are local")
    theta, factor, local_theta = _rope(raw, size["max_position_embeddings"])
    return {
        "vocabulary": size["vocab_size"],
        "layers": layers,
        "embed": size["hidden_size"],
        "heads": size["num_attention_heads"],
        "kv_heads": size["num_key_value_heads"],
        "head_dim": size["head_dim"],
        "mlp": size["intermediate_size"],
        "max_sequence": size["max_position_embeddings"],
        "window": size["sliding_window"],
        "global_every": every,
        "rope_theta": theta,
        "rope_local_theta": local_theta,
        "rope_factor": factor,
        "norm_epsilon": value_of(raw, "rms_norm_eps", float, 1e-6),
        "tied_embeddings": value_of(raw, "tie_word_embeddings", bool, True),
        "query_scalar": value_of(raw, "query_pre_attn_scalar", float, 256.0),
    }


def _global_every(raw: Mapping[str, Any], layers: int) -> tuple[int, bool]:
    """Returns which layers are global, as `Config.global_every` says it, and whether any is local."""
    names = [name for name in ("sliding_window_pattern", "_sliding_window_pattern") if raw.get(name)]
    said = {name: size_of(raw, name, None, 10_000) for name in names}
    every = published_rope.agreed(said, PATTERN)
    kinds = kinds_of_layers(raw, layers)
    if kinds is None:
        return every, every > 1
    for each in (every, *range(1, layers + 2)):
        if kinds == local_layers(layers, each):
            require(each == every or not names, f"layer_types: contradicts {names and names[0]} = {every}")
            return each, any(kinds)
    raise InputError("layer_types: is not built unless each so-many-th layer is full_attention")


def local_layers(layers: int, every: int) -> list[bool]:
    """Returns of each layer whether it has the window."""
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _rope(raw: Mapping[str, Any], positions: int) -> tuple[float, float, float]:
    """Returns the base and the factor of global layers, and the base of local ones."""
    published_rope.whole(raw, "partial_rotary_factor", "")
    groups = published_rope.group(raw, "rope_parameters") or {}
    flat = [name for name in groups if name not in (LOCAL, GLOBAL)]
    said = f"must be under {GLOBAL} and {LOCAL}, which have positions of their own"
    require(not flat, f"rope_parameters.{flat and flat[0]}: {said}")
    factors, bases = {}, {}
    for kind, old in ((GLOBAL, "rope_theta"), (LOCAL, "rope_local_base_freq")):
        prefix = f"rope_parameters.{kind}."
        given = published_rope.group(groups, kind, "rope_parameters.")
        found = {old: value_of(raw, old, float, None)}
        if given is not None:
            found[f"{prefix}rope_theta"] = value_of(given, "rope_theta", float, None, prefix)
            kinds = ("default", "linear") if kind == GLOBAL else ("default",)
            factors[kind] = {prefix[:-1]: _factor(published_rope.scaling(given, prefix, positions, kinds))}
        default = THETA if kind == GLOBAL else LOCAL_THETA
        bases[kind] = published_rope.agreed(
            {name: base for name, base in found.items() if base is not None}, default
        )
    found = factors.get(GLOBAL, {})
    if "rope_scaling" in raw:
        given = published_rope.group(raw, "rope_scaling") or {}
        scaling = published_rope.scaling(given, "rope_scaling.", positions, ("default", "linear"))
        found = {"rope_scaling": _factor(scaling), **found}
    return bases[GLOBAL], published_rope.agreed(found, 1.0), bases[LOCAL]


def _factor(scaling: RopeScaling | None) -> float:
    return 1.0 if scaling is None else scaling.factor


def write(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json, see `Published`."""
    factor, local = config.rope_factor, local_layers(config.layers, config.global_every)
    stretched = published_rope.group_of(None if factor == 1 else RopeScaling(factor, kind="linear"))
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.vocabulary,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": config.max_sequence,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": _scalar(config),
        "sliding_window": config.window,
        "sliding_window_pattern": config.global_every,
        "layer_types": layer_kinds(local),
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.rope_local_theta,
        "rope_scaling": None if factor == 1 else stretched,
        "rope_parameters": {
            GLOBAL: {"rope_theta": config.rope_theta, **stretched},
            LOCAL: {"rope_theta": config.rope_local_theta, "rope_type": "default"},
        },
    }


def _scalar(config: Any) -> int | float:
    """Returns what scores are divided by the root of; whole, as its key is declared, where it can be."""
    scalar = float(config.query_scalar or config.head_dim)
    return int(scalar) if scalar.is_integer() else scalar


BLOCK = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "self_attn.q_proj.weight": ("attention", "query"),
    "self_attn.k_proj.weight": ("attention", "key"),
    "self_attn.v_proj.weight": ("attention", "value"),
    "self_attn.o_proj.weight": ("attention", "out"),
    "self_attn.q_norm.weight": ("attention/query_norm", "scale"),
    "self_attn.k_norm.weight": ("attention/key_norm", "scale"),
    "post_attention_layernorm.weight": ("attention_out_norm", "scale"),
    "pre_feedforward_layernorm.weight": ("mlp_norm", "scale"),
    "mlp.gate_proj.weight": ("mlp", "gate"),
    "mlp.up_proj.weight": ("mlp", "up"),
    "mlp.down_proj.weight": ("mlp", "down"),
    "post_feedforward_layernorm.weight": ("mlp_out_norm", "scale"),
}


def tensors(config: Any) -> Iterator[Tensor]:
    """Yields all published tensors, see `Published`."""
    yield Tensor("model.embed_tokens.weight", ("embedding", "table"))
    for layer in range(config.layers):
        yield from layer_tensors(layer, BLOCK)
    yield Tensor("model.norm.weight", ("head", "norm", "scale"))
    if not config.tied_embeddings:
        yield Tensor("lm_head.weight", ("head", "matrix"), transposed=True)


REFUSED = {
    "gemma": "Gemma 1 is not built; built: gemma3_text",
    "gemma2": "Gemma 2 is not built, for it caps its logits; built: gemma3_text",
    "gemma3": "holds a model of images too, which is not built; built: its text model alone, whose "
    "model_type is gemma3_text",
    "gemma3n": "Gemma 3n is not built; built: gemma3_text",
}
PUBLISHED = Published(("gemma3_text",), read, write, tensors, refused=REFUSED)
