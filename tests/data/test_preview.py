"""The preview shows rows as they are trained on: decoded, with what is trained on told apart, and counted."""

import numpy as np
import pytest
import rich.console
from chatting import HELLO, MORE, mix

import jaxthru
from jaxthru.data.__main__ import main
from jaxthru.data.loading import preview
from jaxthru.data.loading.dataset import DataConfig, open_data
from jaxthru.runtime.errors import InputError

ROWS = [{"messages": MORE}, {"messages": HELLO}, {"text": "the row"}]
SEQUENCE = 128


@pytest.fixture
def data(tmp_path):
    config = DataConfig(mix=str(mix(tmp_path, ROWS)), sequence=SEQUENCE, store=str(tmp_path / "store"))
    with open_data(config) as opened:
        yield opened


def test_what_is_trained_on_is_in_colour_or_between_marks(data):
    batch = preview.sample(data, 0, 5)
    text = preview.decoded(data, batch, 0)
    assert len(batch["tokens"]) == 1
    green = [text.plain[span.start : span.end] for span in text.spans]
    assert {*green} == {"A row.<|im_end|>\n", "The token, the row.<|im_end|>\n", " row<|endoftext|>"}
    assert "⟦A row.<|im_end|>\n⟧<|im_start|>user\nAnd?" in preview.plain(text)
    for colours, marked in ((None, True), ("truecolor", False)):
        console = rich.console.Console(color_system=colours, force_terminal=not marked, width=400)
        with console.capture() as printed:
            preview.print_row(console, text)
        assert ("⟦" in printed.get()) == marked and ("\x1b[1;32mA row." in printed.get()) != marked


def test_the_preview_counts_what_the_batch_has(data, capsys, tmp_path):
    batch = preview.sample(data, 0, 1)
    ids, trained = batch["tokens"][0], preview.trained_tokens(batch)[0]
    assert trained.sum() == batch["loss_mask"].sum()
    followed = np.flatnonzero(trained)
    assert (batch["targets"][0, followed - 1] == ids[followed]).all()
    used = int((batch["segment_ids"] > 0).sum())
    said = (
        f"3 documents, {trained.sum()} of {used} tokens trained on, {1 - trained.sum() / used:.1%} masked, "
    )
    assert preview.counts(batch, 0) == f"{said}{used / SEQUENCE:.1%} full"
    arguments = ["preview", data.config.mix, "--store", data.config.store, "--sequence", str(SEQUENCE)]
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (said, f"padding: {SEQUENCE - used} tokens", "⟦A row.<|im_end|>", "of 3 documents in 1 rows"):
        assert part in printed
    assert "document 1: tokens 0 to " in printed and "of them trained on, the document ends" in printed


def test_a_notebook_gets_rows_with_colours_and_marks(data):
    text = jaxthru.preview(data, "chats", rows=3)
    batch = preview.sample(data, 0, 3)
    assert text.plain == f"{preview.counts(batch, 0)}\n{preview.plain(preview.decoded(data, batch, 0))}"
    assert "⟦A row.<|im_end|>\n⟧" in {text.plain[span.start : span.end] for span in text.spans}
    assert {span.style for span in text.spans} == {preview.TRAINED}
    with pytest.raises(InputError, match=r"source 'chat': the mix has chats"):
        jaxthru.preview(data, "chat")


def test_a_run_begins_with_how_a_row_looks(data, monkeypatch):
    (line,) = preview.opening(data)
    assert line.startswith("source chats, its first row; what is trained on stands in ⟦⟧:\n──── document 1")
    assert "⟦A row.<|im_end|>\n⟧" in line
    monkeypatch.setattr(preview, "SHOWN", 60)
    assert preview.opening(data)[0].endswith(" ...")


def test_of_plain_text_nothing_is_told_apart(mix, tmp_path, capsys):
    with open_data(DataConfig(mix=str(mix), sequence=64, store=str(tmp_path / "store"))) as data:
        assert preview.opening(data) == []
        text = preview.decoded(data, preview.sample(data, 0, 1), 0)
        assert not text.spans and "trained on" not in text.plain
    assert main(["preview", str(mix), "--store", str(tmp_path / "store"), "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert "⟦" not in printed and "books, row 2" in printed


def test_a_long_conversation_is_dropped_or_truncated_as_asked(data, capsys):
    arguments = ["preview", data.config.mix, "--store", data.config.store, "--sequence", "40"]
    assert main(arguments) == 0
    assert "1 longer than data.sequence = 40" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--over-long", "truncate"]) == 0
    assert "truncated: 1" in " ".join(capsys.readouterr().out.split())
