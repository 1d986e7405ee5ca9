import pytest

from jaxthru.data.__main__ import main


def test_prepare_and_inspect(shared, capsys):
    mix, store = map(str, shared)
    assert main(["prepare", mix, "--store", store]) == 0
    assert "tokens" in capsys.readouterr().out
    assert main(["inspect", mix, "--store", store, "--sequence", "64", "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert "All checksums agree." in printed
    assert " of 300 tokens. Each document ends with <|endoftext|> (0)." in printed
    for name in ("books", "notes"):
        assert f"{name}, row 2" in printed
    assert "document 2: tokens" in printed and "the document ends" in printed and "<|endoftext|>" in printed
    options = ["--packing", "best_fit", "--rows", "0", "--sequence", "512"]
    assert main(["inspect", mix, "--store", store, *options]) == 0
    assert "row 1" not in capsys.readouterr().out


def test_prepare_packs_nothing(shared, monkeypatch):
    monkeypatch.setattr("jaxthru.data.loading.packed_split.pack", None)
    mix, store = map(str, shared)
    assert main(["prepare", mix, "--store", store]) == 0


def test_prepare_names_a_source_that_comes_round_often(mix, capsys):
    (mix.parent / "tiny.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    text = mix.read_text().replace("*.jsonl", "records.jsonl").replace("held_out = 0.2", "held_out = 0")
    mix.write_text(text + '[sources.tiny]\nrecipe = "local_jsonl"\npaths = ["tiny.jsonl"]\nweight = 0.1\n')
    assert main(["prepare", str(mix), "--store", str(mix.parent / "store")]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "read more than" in line]
    assert line.startswith(
        "1 source is read more than 4 times while as many tokens are read as there are (tiny "
    )


def test_inspect_shows_the_schedule(shared, capsys):
    mix, store = shared
    changed = mix.with_name("changed.toml")
    capped = "weight = [[0, 3], [2000, 1]]\nmax_epochs = 2\n"
    changed.write_text('unit = "tokens"\n' + mix.read_text().replace("weight = 3\n", capped))
    assert main(["inspect", str(changed), "--store", str(store), "--rows", "0"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("0.750 → 0.500", "0.250 → 0.500", "at most 2 epochs, then drop"):
        assert part in printed
    assert "Shares are of tokens, linear, at tokens 0, 2,000." in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "quikstart"], "did you mean 'quickstart'"),
        (["inspect", "quickstart", "--sequence", "1"], "data.sequence = 1"),
        (["inspect", "quickstart", "--rows", "-1"], "--rows -1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path):
    assert main([*arguments, "--store", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            '["text/*.txt"]',
            '["s3://bucket/*.txt"]',
            "s3://bucket/*.txt is not on this machine; copy or mount",
        ),
        ('["text/*.txt"]', '["text"]', "/text is a folder; give a glob, "),
        ('["text/*.txt"]', '["~nosuchuser/x"]', "no home folder is known for it"),
        (
            '["text/*.txt"]',
            '["text/*.txt"]\nsuffixes = [".md"]',
            "60 match; suffixes, exclude and max_file_bytes",
        ),
        (
            "[sources.notes]",
            "[sources.notes]\ntext_key = 'body'",
            "no text under 'body'; its keys: 'text', 'id'",
        ),
        (
            "held_out = 0.2",
            "temperature = 0.5",
            "unknown key temperature; valid: count, description, held_out",
        ),
        (
            "held_out = 0.2",
            "held_out = 0.999999",
            "source books: no text to train on in 60 files: all is held out",
        ),
        (
            "weight = 3",
            "weight = 3\nmax_damaged = 2.0",
            "sources.books.max_damaged = 2.0: is a share, 1 at most",
        ),
        ("[sources.books]", '[sources."a\\u0000b"]', r"source 'a\x00b': its store is named after it"),
        ("[sources.books]", '[sources."a\\nb"]', r"source 'a\nb': its store is named after it"),
        (
            "[sources.books]",
            f"[sources.{'n' * 300}]",
            "its store is named after it: give it 1 to 100 characters",
        ),
    ],
)
def test_what_a_mix_has_wrong_is_one_line(mix, before, after, message, capsys):
    mix.write_text(mix.read_text().replace(before, after, 1))
    assert main(["prepare", str(mix), "--store", str(mix.parent / "store")]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxthru: ")]
    assert message in line


def test_files_that_another_source_has_taken_are_said_to_be(mix, capsys):
    again = '[sources.again]\nrecipe = "local_text"\npaths = ["text/1.txt"]\nweight = 1\n'
    mix.write_text(mix.read_text() + again)
    assert main(["prepare", str(mix), "--store", str(mix.parent / "store")]) == 2
    why = "source again: all its 1 files have been taken by sources of the same format before it"
    assert why in capsys.readouterr().err


def test_a_store_of_no_path_is_one_line(mix, capsys):
    assert main(["prepare", str(mix), "--store", "a\0b"]) == 2
    printed = capsys.readouterr().err
    assert r"data.store = 'a\x00b': is no path" in printed and printed.count("\n") == 1


def test_what_looks_like_markup_is_shown_as_it_is(mix, capsys):
    text = mix.read_text().replace("[sources.books]", "[sources.'é [x]']")
    mix.write_text('description = "see [/docs]"\n' + text)
    assert main(["inspect", str(mix), "--store", str(mix.parent / "store"), "--sequence", "64"]) == 0
    printed = capsys.readouterr().out
    assert "see [/docs]" in printed and "é [x], row 1" in printed


def test_a_terminal_is_not_made_to_obey_what_data_holds(mix, capsys):
    for path in (mix.parent / "text").iterdir():
        path.write_text("\x1b]0;title\x07 one\ttwo\n三\u3000四\x9b31m")
    (mix.parent / "text" / "\x1b[2J.txt").write_bytes(b"\xff")
    mix.write_text(mix.read_text().replace("held_out = 0.2", 'held_out = 0\ndescription = "a\\u001b[31mb"'))
    mix.write_text(mix.read_text().replace("weight = 3", "weight = 3\nmax_damaged = 1.0"))
    assert main(["inspect", str(mix), "--store", str(mix.parent / "store"), "--sequence", "64"]) == 0
    printed = capsys.readouterr()
    assert r"\x1b]0;title\x07 one" in printed.out and "三\u3000四\\x9b31m" in printed.out
    assert r"small: a\x1b[31mb" in printed.out and r"/text/\x1b[2J.txt, byte 0: not UTF-8" in printed.err
    assert not set(printed.out + printed.err) & {"\x1b", "\x07", "\x9b"}


def test_no_files_is_one_line(mix, capsys):
    mix.write_text(mix.read_text().replace("text/*.txt", "none/*.txt"))
    assert main(["prepare", str(mix), "--store", str(mix.parent / "store")]) == 2
    assert "source books: no files found in" in capsys.readouterr().err


def test_ctrl_c_is_one_line(mix, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxthru.data.__main__.open_stores", interrupted)
    assert main(["prepare", str(mix)]) == 130
    assert capsys.readouterr().err == "jaxthru: interrupted\n"
