"""Records what Hugging Face's transformers makes of Gemma 3 270M, in float32 on a CPU.

    python tests/golden/record_gemma_gguf.py GGUF_FILE

needs numpy, torch, transformers and gguf, and neither JAX nor jaxthru. The file is the one that the packages
of tests/huggingface/gemma_gguf.py carry, and is read by transformers itself. It writes gemma_gguf.npz beside
itself, for tests/huggingface/test_gemma_gguf.py:

    ids       int32 [T]: gemma_text.md, with the BOS token
    losses    float32 [T-1]: of each token given those before it, in nats
    prompt_<name>, greedy_<name>    int32: a prompt, and 64 tokens after it, the most probable each time
    about     JSON: the GGUF file's SHA-256, the perplexity, versions, and how far ahead of the second most
              probable token the chosen ones were at least (`margins`, of logits: where one is about the error
              of float32, 1e-4, another prompt is needed)

No weight is in it.
"""

import hashlib
import json
import platform
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parent
PROMPT = "def fibonacci(n):\n"
LONG = 700  # tokens of the text as another prompt: more than the local layers' window of 512
TOKENS = 64
ROWS = 256  # of logits at a time: all of them would take gigabytes


def main() -> None:
    file = Path(sys.argv[1]).resolve()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    model.eval()
    ids = tokenizer((FOLDER / "gemma_text.md").read_text(encoding="utf-8")).input_ids
    prompts = {"short": tokenizer(PROMPT).input_ids, "long": ids[:LONG]}
    with torch.no_grad():
        losses = losses_of(model, torch.tensor([ids]))
        greedy = {name: continued(model, prompt) for name, prompt in prompts.items()}
    about = {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "perplexity": float(np.exp(losses.astype(np.float64).mean())),
        "margins": {name: margin for name, (_, margin) in greedy.items()},
        "answers": {name: tokenizer.decode(tokens) for name, (tokens, _) in greedy.items()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps(about, indent=2, ensure_ascii=False))
    np.savez_compressed(
        FOLDER / "gemma_gguf.npz",
        ids=np.array(ids, np.int32),
        losses=losses,
        **{f"prompt_{name}": np.array(tokens, np.int32) for name, tokens in prompts.items()},
        **{f"greedy_{name}": np.array(tokens, np.int32) for name, (tokens, _) in greedy.items()},
        about=json.dumps(about),
    )


def losses_of(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    """Returns the loss of each token but the first, float32 [T-1]. ids: [1, T]."""
    (hidden,) = model.model(input_ids=ids).last_hidden_state
    # In float64, as a float32 sum over 262,144 tokens would be 3e-5 off, and always to the same side.
    found = [
        torch.nn.functional.cross_entropy(model.lm_head(rows).double(), targets, reduction="none")
        for rows, targets in zip(hidden[:-1].split(ROWS), ids[0, 1:].split(ROWS), strict=True)
    ]
    return torch.cat(found).float().numpy()


def continued(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """Returns the most probable tokens after the prompt, and the least margin of a choice."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [torch.topk(logits[0], 2).values for logits in found.logits]
    return found.sequences[0, len(prompt) :].tolist(), min(float(two[0] - two[1]) for two in best)


if __name__ == "__main__":
    main()
