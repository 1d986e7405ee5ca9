"""Published weights: how long an 8B takes to load and to write, and parity with what transformers says."""

from suites.measured import Measured

FAMILIES = ("llama3", "llama_yarn", "smollm", "mistral", "qwen2", "qwen3", "gemma3")

# fmt: off
ROWS = {
    "weights": Measured(
        "a folder of Llama 3 8B's shape, 16.1 GB of bfloat16",
        contenders={what: f"published_weights.py {what}" for what in ("bfloat16", "float32", "write")},
        seconds=150,
        columns={"first s": ("first_seconds", ".2f"), "s": ("seconds", ".2f"),
                 "over plain, 1 thread": ("over_plain", ".2f"), "4 threads": ("over_four_threads", ".2f"),
                 "anonymous GiB": ("anonymous_gib", ".2f"), "pinned GiB": ("pinned_gib", ".2f"),
                 "equal bytes": ("byte_identical", "d")}),
    "parity": Measured(
        "folders that transformers makes: logits, greedy text and exports",
        contenders={family: f"published_parity.py {family}" for family in FAMILIES}, seconds=200,
        columns={"largest difference": ("float32_difference", ".1e"),
                 "largest KL": ("float32_kl_largest", ".0e"), "bf16 KL": ("bfloat16_kl", ".1e"),
                 "transformers' own bf16": ("bfloat16_kl_of_transformers", ".1e"),
                 "folders": ("folders_equal", "d")}),
}
# fmt: on
NOTES = """\
weights: the first load of a process compiles what transposes; of three the fastest counts. Plain reading and
writing of the same bytes stand beside it. parity: folders is 1 where an untrained folder is exported with
equal bytes, and after two updates from_pretrained of the export misses nothing and writes the same text.
"""
