"""The tokenizer of a mix: trained on its training documents, or any Hugging Face tokenizer.json on disk."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require

END_OF_TEXT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"),
    *("<｜end▁of▁sentence｜>", "<|im_end|>", "[EOS]", "<EOS>"),
)
"""The usual names of the token that ends a document, in the order of preference."""


class Tokenizer:
    """A tokenizer.json. hash: SHA-256 of the file. vocabulary: highest id + 1. end_of_text: an id."""

    def __init__(self, path: Path):
        # The library warns after a fork and then encodes on one core, unless the user has decided.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        content = path.read_bytes()
        self.path, self.hash = path, hashlib.sha256(content).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no narrower class
            raise InputError(f"{path}: not a tokenizer.json ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that spells out a special token must not thereby end itself.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=0) + 1
        known = [ids[name] for name in END_OF_TEXT if name in ids]
        require(bool(known), f"{path}: has no end-of-text token; looked for {', '.join(END_OF_TEXT)}")
        self.end_of_text = known[0]
        self.dtype = np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, the end-of-text token last. Uses all cores. Raises InputError."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # as above
            raise InputError(f"{self.path}: cannot tokenise what the sources hold ({error})") from error
        return [np.array([*encoding.ids, self.end_of_text], self.dtype) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of some ids, special tokens shown."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def train(texts: Iterator[str], vocabulary: int, path: Path) -> None:
    """Trains a byte-level BPE on `texts` and writes it to `path` in one piece."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_atomically(path, tokenizer.to_str(pretty=True).encode())
