"""Records what Hugging Face's transformers makes of Gemma 3 270M, in float32 on a CPU.

    python tests/golden/record_gemma_gguf.py GGUF_FILE

needs numpy, torch, transformers and gguf, and neither JAX nor jaxthru. The file is the one that the packages
of tests/huggingface/gemma_gguf.py carry, and is read by transformers itself. It writes gemma_gguf.npz beside
itself, for tests/huggingface/test_gemma_gguf.py:

    ids       int32 [T]: gemma_text.md, with the BOS token
    losses    float32 [T-1]: of each token given those before it, in nats
    prompt, greedy    int32: a prompt, and the 64 most probable tokens that follow it, one after the other
    about     JSON: the GGUF file's SHA-256, the perplexity, versions, and how far ahead of the second most
              probable token the chosen ones were at least (`margin`, of logits)

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
PROMPT = "The harbour froze in January. In February, the"
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
    prompt = tokenizer(PROMPT).input_ids
    with torch.no_grad():
        losses = losses_of(model, torch.tensor([ids]))
        greedy, margin = continued(model, prompt)
    about = {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "perplexity": float(np.exp(losses.astype(np.float64).mean())),
        "margin": margin,
        "answer": tokenizer.decode(greedy),
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
        prompt=np.array(prompt, np.int32),
        greedy=np.array(greedy, np.int32),
        about=json.dumps(about),
    )


def losses_of(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    """Returns the loss of each token but the first, float32 [T-1]. ids: [1, T]."""
    (hidden,) = model.model(input_ids=ids).last_hidden_state
    found = [
        torch.nn.functional.cross_entropy(model.lm_head(rows).float(), targets, reduction="none")
        for rows, targets in zip(hidden[:-1].split(ROWS), ids[0, 1:].split(ROWS), strict=True)
    ]
    return torch.cat(found).numpy()


def continued(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """Returns the most probable tokens after the prompt, without a cache, and the least margin of a choice."""
    ids, margins = list(prompt), []
    for _ in range(TOKENS):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        best = torch.topk(logits, 2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], min(margins)


if __name__ == "__main__":
    main()
