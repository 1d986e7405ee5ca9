"""A tokenizer: trained on the training documents of a mix, or any Hugging Face tokenizer.json on disk."""

import datetime
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxthru.data.sources.chat.sandbox import DAY, Failure
from jaxthru.data.sources.chat.template import ChatTemplate
from jaxthru.data.sources.record import Document, Place
from jaxthru.data.store.marked import Encoded, Marked, MarkedEncoder, spellings
from jaxthru.data.store.tokenizer_folder import (
    BORDERS,
    FILES,
    TEMPLATE,
    TOKENIZER,
    TURN_END,
    UNSAID,
    Borders,
    read_borders,
    read_object,
    read_template,
    template_variables,
    tokenizer_file,
)
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, did_you_mean, require

END_OF_TEXT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"),
    *("<｜end▁of▁sentence｜>", "<|im_end|>", "[EOS]", "<EOS>"),
)
"""The usual names of the token that ends a document, in the order of preference."""


class Tokenizer:
    """A tokenizer.json, and what each document begins and ends with. See `Tokenizer.of`.

    path: of the tokenizer.json. hash: SHA-256 of that file. vocabulary: highest id + 1. dtype: of ids.
    talks: whether there are conversations among the documents.
    bos: the id that each document begins with, None for none. end_of_text: the id that it ends with.
    borders: these two as they are spelled, bos "" for none.
    identity: what decides which tokens a document becomes: the hash, and bos and end_of_text where they are
        not what a tokenizer.json alone would have.
    """

    def __init__(
        self,
        path: Path,
        borders: Borders = UNSAID,
        *,
        folder: bool = False,
        template: str | None = None,
        talks: bool = False,
    ):
        """path: of the tokenizer.json. folder: whether what lies beside it belongs to it, and says what
        `borders` does not. template: which chat template, see `tokenizer_folder.read_template`. talks:
        whether there are conversations among the documents. Raises InputError."""
        # The library warns after a fork and then encodes on one core, unless the user has decided.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        self.path, self.hash, self._folder = path, hashlib.sha256(content).hexdigest(), folder
        self._content, self._template = content, template
        self.talks = talks or (folder and TURN_END in read_object(path.parent / BORDERS))
        self._tokenizer = self._made(content)
        # A document that spells out a special token must not thereby end itself.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=0) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        ordinary = (each for each in ids.values() if not (each in added and added[each].special))
        self._last_ordinary = max(ordinary, default=0)
        usual = next((ids[name] for name in END_OF_TEXT if name in ids), None)
        found = read_borders(path.parent, self._tokenizer) if folder else UNSAID
        bos = found.bos if borders.bos is None else borders.bos
        end = found.end if borders.end is None else borders.end
        self.bos = self._id("bos", bos, ids) if bos else None
        self.end_of_text = usual if end is None else self._id("end", end, ids)
        looked = f"{path}: has no end-of-text token; looked for {', '.join(END_OF_TEXT)}"
        require(self.end_of_text is not None, looked)
        names = (None if each is None else self._tokenizer.id_to_token(each) for each in self._ends())
        self.borders = Borders(*(name or "" for name in names))
        plain = self._ends() == (None, usual)
        self.identity = self.hash if plain else f"{self.hash} bos={self.bos} end={self.end_of_text}"
        self.dtype = np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")

    @classmethod
    def of(
        cls,
        path: Path | str,
        borders: Borders = UNSAID,
        template: str | None = None,
        talks: bool = False,
    ) -> "Tokenizer":
        """Returns the tokenizer of a folder of published weights, of a run directory or of a tokenizer.json.

        borders: what counts before what a folder's files say; a tokenizer.json alone says no BOS, and the
        first of END_OF_TEXT that it has. template: the chat template that counts before the folder's.
        talks: whether there are conversations among the documents. Raises InputError.
        """
        path = Path(path).expanduser()
        return cls(tokenizer_file(path), borders, folder=path.is_dir(), template=template, talks=talks)

    def __repr__(self) -> str:
        bos = f"begin with {self.borders.bos!r} ({self.bos}) and " if self.borders.bos else ""
        end = f"end with {self.borders.end!r} ({self.end_of_text})"
        return f"<tokenizer {self.path}: vocabulary {self.vocabulary:,}; documents {bos}{end}>"

    @functools.cached_property
    def text_vocabulary(self) -> int:
        """Highest id + 1 of what documents become: of special tokens only BOS and end count, and those that a
        chat template writes, for others may stand for what is no text, beyond the rows that a model has."""
        written = self.chat_template.control_tokens if self.talks else ()
        ids = map(self._tokenizer.token_to_id, written)
        return max(self._last_ordinary, self.end_of_text, self.bos or 0, *(each or 0 for each in ids)) + 1

    @property
    def files(self) -> dict[str, bytes]:
        """The tokenizer's files, byte for byte: {name: content}; of a tokenizer.json alone only that."""
        names = FILES[1:] if self._folder else ()
        beside = {name: self.path.parent / name for name in names}
        found = {name: file.read_bytes() for name, file in beside.items() if file.is_file()}
        return {TOKENIZER: self._content} | found

    @property
    def kept(self) -> dict[str, bytes]:
        """`files`, and the one that says what documents begin and end with: what a run directory keeps, from
        which `Tokenizer.of` returns this tokenizer again, whatever a mix has said."""
        borders = {"bos": self.borders.bos or None, "end": self.borders.end}
        if self.talks:
            borders[TURN_END] = self.chat_template.turn_end
        named = {TEMPLATE: self.chat_template.text.encode()} if self._template else {}
        return self.files | named | {BORDERS: (json.dumps(borders, ensure_ascii=False) + "\n").encode()}

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of conversations. Raises InputError if there is none, or one that is none."""
        folder = self.path.parent if self._folder else None
        text, name = read_template(folder, self._template)
        return ChatTemplate(text, name, template_variables(folder, self.borders), spellings(self._tokenizer))

    @property
    def stop(self) -> tuple[int, ...]:
        """The ids that end an answer: the end of text, and the end of a turn by the chat template. Raises
        InputError if there is no template."""
        turn = self._tokenizer.token_to_id(self.chat_template.turn_end or "")
        return tuple(dict.fromkeys((self.end_of_text, *([] if turn is None else [turn]))))

    @property
    def learnt_stop(self) -> tuple[int, ...]:
        """The ids that the documents end with: the end of text, and the end of a turn where there were
        conversations among them."""
        return self.stop if self.talks else (self.end_of_text,)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text as a document: the BOS token first if there is one, the end-of-text
        token last. A special token that a text spells out is text. Uses all cores. Raises InputError."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises no narrower class
            raise InputError(f"{self.path}: cannot tokenise what the sources hold ({error})") from error
        begin = () if self.bos is None else (self.bos,)
        return [np.array([*begin, *encoding.ids, self.end_of_text], self.dtype) for encoding in encodings]

    def encode_documents(self, documents: Sequence[Marked]) -> list[Encoded]:
        """Returns the ids of each document, and which of them are targets that are trained on.

        One that no template wrote becomes what `encode` returns. Of one that a template wrote nothing is
        added, and control tokens are tokens, but for those in its `literal` spans. Of one with `trained`
        spans a token is trained on that has a character of them; so is the end-of-text token where they reach
        the text's end. Uses all cores. Raises InputError.
        """
        plain = [not document.rendered and document.trained is None for document in documents]
        texts = [document.text for document, is_plain in zip(documents, plain, strict=True) if is_plain]
        marked = [document for document, is_plain in zip(documents, plain, strict=True) if not is_plain]
        of_texts = iter(self.encode(texts) if texts else ())
        try:
            of_marked = iter(self._marked.encode(marked) if marked else ())
        except Exception as error:  # as above
            raise InputError(f"{self.path}: cannot tokenise what the sources hold ({error})") from error
        return [Encoded(next(of_texts), None) if is_plain else next(of_marked) for is_plain in plain]

    def part(self, ids: np.ndarray, begins: bool, ends: bool) -> np.ndarray:
        """Returns what `encode` has made of a part of a document, without the tokens of a border that it does
        not reach. begins, ends: whether the document does with this part."""
        return ids[self.bos is not None and not begins : None if ends else -1]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Returns the ids of a prompt, int32 [n]: the BOS token first where documents have one, and no end.

        Unlike in a document, special tokens that the text spells out are taken for what they name: whoever
        writes `<|im_start|>` into a prompt means the token. A prompt that spells out its BOS token gets no
        second one. Raises InputError.
        """
        try:
            ids = self._prompts.encode(text, add_special_tokens=False).ids
        except Exception as error:  # as above
            raise InputError(f"{self.path}: cannot tokenise the prompt ({error})") from error
        begin = [] if self.bos is None or ids[:1] == [self.bos] else [self.bos]
        return np.array([*begin, *ids], np.int32)

    def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        day: datetime.date = DAY,
    ) -> np.ndarray:
        """Returns the ids of a conversation as the chat template writes it, int32 [n], to where the assistant
        is to begin. What its messages spell out is text. day: what the template takes for today.

        Raises InputError where there is no template, or it refuses the conversation.
        """
        try:
            rendered = self.chat_template.render(messages, tools, prompt=True, day=day)
        except Failure as error:
            raise InputError(f"chat template {self.chat_template.name}: {error}") from error
        document = Document(rendered.text, "", Place("", ""), "", None, rendered.literal, True)
        return self.encode_documents([document])[0].ids.astype(np.int32)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Returns the text of some ids. skip_special: leave special tokens out, which else are shown.

        An id beyond the vocabulary, as of a model's padded rows, is nothing; bytes that are no character are
        U+FFFD, see `stream`.
        """
        ids = ids.tolist() if isinstance(ids, np.ndarray) else [int(each) for each in ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def stream(self, ids: Iterable[int], skip_special: bool = False) -> Iterator[str]:
        """Yields the text of ids as they come, in pieces of whole characters: together they are `decode`'s.

        A piece is what one more id adds to the text of the few before it, which decoders look at.
        """
        seen, first, shown = [], 0, 0
        before = text = ""
        for each in ids:
            seen.append(int(each))
            before = self.decode(seen[first:shown], skip_special)
            text = self.decode(seen[first:], skip_special)
            if len(text) > len(before) and not text.endswith("\ufffd"):
                yield text[len(before) :]
                first, shown, before = shown, len(seen), text
        if len(text) > len(before):  # it ended within a character
            yield text[len(before) :]

    def _ends(self) -> tuple[int | None, int]:
        return self.bos, self.end_of_text

    def _id(self, what: str, name: str, ids: dict[str, int]) -> int:
        """Returns the id of a token that documents are to begin or end with. Raises InputError."""
        specials = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        require(
            name in ids,
            lambda: f"{self.path}: {what} = {name!r}: is no token of it{did_you_mean(name, specials[:20])}",
        )
        return ids[name]

    def _made(self, content: bytes) -> tokenizers.Tokenizer:
        try:
            made = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no narrower class
            raise InputError(f"{self.path}: not a tokenizer.json ({error})") from error
        made.no_truncation()
        made.no_padding()
        return made

    @functools.cached_property
    def _prompts(self) -> tokenizers.Tokenizer:
        """Another one, for threads may encode documents: whether special tokens are read is a state of it."""
        made = self._made(self._content)
        made.encode_special_tokens = False
        return made

    @functools.cached_property
    def _marked(self) -> MarkedEncoder:
        ends = {"bos": self.bos, "end": self.end_of_text}
        return MarkedEncoder(self._made, self._content, **ends, dtype=self.dtype)


def train(texts: Iterator[str], vocabulary: int, path: Path, control: Sequence[str] = ()) -> None:
    """Trains a byte-level BPE on `texts` and writes it to `path` in one piece. control: special tokens beside
    the end of text."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT[0], *control],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_atomically(path, tokenizer.to_str(pretty=True).encode())
