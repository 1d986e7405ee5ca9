import pytest

from jaxthru.data.__main__ import main


def test_prepare_and_inspect(shared, capsys):
    mix, store = map(str, shared)
    assert main(["prepare", mix, "--store", store]) == 0
    assert "tokens" in capsys.readouterr().out
    assert main(["inspect", mix, "--store", store, "--sequence", "64", "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert "All checksums agree." in printed
    for name in ("books", "notes"):
        assert f"{name}, row 2" in printed
    assert "document 2: tokens" in printed and "the document ends" in printed and "<|endoftext|>" in printed
    options = ["--packing", "best_fit", "--rows", "0", "--sequence", "512"]
    assert main(["inspect", mix, "--store", store, *options]) == 0
    assert "row 1" not in capsys.readouterr().out


def test_prepare_packs_nothing(shared, monkeypatch):
    monkeypatch.setattr("jaxthru.data.loader.pack", None)
    mix, store = map(str, shared)
    assert main(["prepare", mix, "--store", store]) == 0


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
