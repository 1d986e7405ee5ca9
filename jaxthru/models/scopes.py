"""Name scopes: the names of what a step is made of, within its programs, and of the programs themselves.

The engine and the models give them, and the profiler and the rehearsal read them back out of what XLA
compiled. All take them from here, so that a new name is not lost as "other".
"""

MODEL, LOSS, OPTIMIZER, GRADIENTS = "model", "loss", "optimizer", "gradients"
"""Scopes of a step's phases. GRADIENTS: where those of micro-batches are added up. Within MODEL, the scopes
FORWARD and BACKWARD hold loops over layers."""

EMBEDDING, ATTENTION, MLP, NORM, HEAD = "embedding", "attention", "mlp", "norm", "head"
"""Scopes of the layers' kinds. HEAD has no scope of its own: it is what LOSS and the program HEAD compute."""

ROUTER, DISPATCH, EXPERTS, COMBINE = "router", "dispatch", "experts", "combine"
"""Scopes of a mixture of experts, within MLP: which experts each token goes to, tokens brought to them,
multiplied, and added up."""

ATTENTION_KERNEL = "dot_product_attention"
"""Scope of attention's kernels, without its projections."""

LAYER_KINDS = (ATTENTION, MLP, EMBEDDING, NORM, OPTIMIZER, LOSS)
"""Scopes by which the profiler tells layers; a family's own stages may name more (`Stage.scopes`)."""

PURPOSES = {"optimizer": OPTIMIZER, "loss": LOSS, "activations": MODEL, "gradients": GRADIENTS}
"""What the memory of a temporary is for, as `profile.read.buffers` calls it -> the scope that says so."""

EXCHANGES = {EMBEDDING: "embed"}
"""Scopes whose all-to-alls are meant -> the logical axis that is split where there are any; a family's own
stages may name more (`Stage.exchanges`)."""

STEP = "train_step"
"""The program of a whole step."""

BEGIN, EMBED, FORWARD, LOSS_HEAD, BACKWARD, EMBED_BACKWARD = (
    *("begin", "embed", "forward"),
    *("head", "backward", "embed_backward"),
)
UPDATE_EMBEDDING, UPDATE_HEAD, UPDATE_LAYER, FINISH = (
    *("update_embedding", "update_head", "update_layer"),
    "finish",
)
"""The programs of a step that the host dispatches. Of blocks of several kinds, each has its own FORWARD,
BACKWARD and UPDATE_LAYER, with the kind behind the name, see `program`."""


UPDATES = UPDATE_EMBEDDING, UPDATE_HEAD, UPDATE_LAYER


def program(name: str, kind: str = "") -> str:
    """Returns what the program of a kind of block is called."""
    return f"{name}__{kind}" if kind else name


def program_of(module: str) -> str:
    """Returns the name of the program, without kind, that an HLO module was compiled from."""
    return module.removeprefix("jit_").partition(".")[0].partition("__")[0]
