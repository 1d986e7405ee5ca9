import pytest

from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.sources.files import HashCache, collect
from jaxthru.data.sources.readers import FORMATS, options_of
from jaxthru.data.sources.recipes import REPOSITORY, Recipe
from jaxthru.data.store.mix_file import load_mix
from jaxthru.runtime import plain
from jaxthru.runtime.errors import InputError


def test_the_quickstart():
    mix = load_mix("quickstart")
    assert list(mix.recipes) == ["python_stdlib", "scientific_packages", "prose", "structured"]
    assert sum(mix.mixture.weights(0, 1).values()) == pytest.approx(1)
    assert mix.tokenizer.vocabulary == 8192 and mix.tokenizer.train_bytes <= 20_000_000
    for recipe in mix.recipes.values():
        assert recipe.cap_bytes <= 12_000_000
        assert "jaxthru" not in recipe.packages and "pytest" not in recipe.packages  # not even with `dev`


def test_every_recipe_is_complete(tmp_path):
    names = sorted(path.parent.name for path in REPOSITORY.glob("sources/*/source.toml"))
    assert len(names) == 13
    (tmp_path / "tokenizer.json").touch()  # conversations need one that is there
    tables = [f'[sources.{name}]\nweight = 1\npaths = ["x"]\n' for name in names]
    (tmp_path / "all.toml").write_text("".join(['tokenizer = "tokenizer.json"\n', *tables]))
    mix = load_mix(str(tmp_path / "all.toml"))
    assert all(recipe.description for recipe in mix.recipes.values())
    assert mix.recipes["local_text"].paths == (str(tmp_path / "x"),)


def test_the_folder_of_a_mix_is_no_pattern(tmp_path):
    folder = tmp_path / "corpus [2024] *"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "m.toml").write_text('[sources.local_text]\npaths = ["*.txt"]\nweight = 1\n')
    recipe = load_mix(str(folder / "m.toml")).recipes["local_text"]
    [file] = collect("local_text", recipe, HashCache(tmp_path / "none.json"), frozenset())
    assert file.path == folder / "a.txt"


def test_the_page_of_instructions_is_true(tmp_path):
    page = (REPOSITORY.parent / "docs" / "data.md").read_text()
    (tmp_path / "books.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    mix = load_mix(str(tmp_path / "books.toml"))
    assert [recipe.format for recipe in mix.recipes.values()] == ["text", "jsonl", "tar"]
    words = page.replace("`", " ").replace(",", " ").split()
    options = {name for format in FORMATS for name in plain.fields(options_of(format))}
    for name in ({*plain.fields(Recipe)} - {"description", "options"}) | options | {*FORMATS}:
        assert name in words, f"docs/data.md says nothing of {name}"


def test_the_nearest_folder_wins(tmp_path, monkeypatch):
    (tmp_path / "data" / "mixes").mkdir(parents=True)
    (tmp_path / "data" / "mixes" / "quickstart.toml").write_text("[sources.prose]\nweight = 2\n")
    monkeypatch.chdir(tmp_path)
    assert load_mix("quickstart").mixture == Mixture.plain({"prose": 1.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heldout = 0.1\n[sources.prose]\nweight = 1", "unknown key heldout; did you mean 'held_out'"),
        ("[sources.prose]\nweight = 1\ncap_byte = 1", "sources.prose.cap_byte; did you mean 'cap_bytes'"),
        (
            "[sources.local_jsonl]\npaths = ['x']\nweight = 1\nextension = 'md'",
            "bad.toml: sources.local_jsonl.extension = 'md': is read with format = 'tar', not 'jsonl'$",
        ),
        (
            "[sources.local_text]\npaths = ['x']\nweight = 1\ntext_key = 'body'",
            "local_text.text_key = 'body': is read with format = 'array_record' or .* 'tar', not 'text'$",
        ),
        (
            "[sources.local_tar]\npaths = ['x']\nweight = 1\nformat = 'docstrings'",
            "bad.toml: sources.local_tar.text_key = 'text': is read with format = .*, not 'docstrings'$",
        ),
        ("[sources.pros]\nweight = 1", "no recipe 'pros'; did you mean 'prose'"),
        ("[sources.prose]\nweight = -1", r"sources.prose.weight = -1: must be a number >= 0"),
        (f"[sources.prose]\nweight = {'9' * 400}", r"weight = 9+: must be a number >= 0"),
        ("[sources.prose]", "sources.prose.weight is missing"),
        (
            "[sources.'../prose']\nrecipe = 'prose'\nweight = 1",
            "its store is named after it: .* none of them '/'",
        ),
        ("[sources.'']\nrecipe = 'prose'\nweight = 1", "its store is named after it"),
        ("[sources.prose]\nweight = 0", "sum to 0"),
        ("[sources.prose]\nweight = inf", "weight = inf"),
        ("[sources.local_text]\nweight = 1", "give it paths"),
        ("[sources.prose]\nweight = 1\npaths = 'x'", "sources.prose.paths must be a list of strings"),
        ("[sources.prose]\nweight = 1\nformat = 'jsonI'", "did you mean 'jsonl'"),
        ("[sources.prose]\nweight = 1\ncap_bytes = true", "cap_bytes = True: must be int"),
        ("[sources.prose]\nweight = 1\nmax_record_bytes = 2147483648", "must be below 2 GiB"),
        ("held_out = 1\n[sources.prose]\nweight = 1", "held_out = 1.0: must be below 1"),
        ("tokenizer = 'none.json'\n[sources.prose]\nweight = 1", "tokenizer = 'none.json': no such file"),
        ("[tokenizer]\nvocabulary = 100\n[sources.prose]\nweight = 1", "must exceed 257"),
        ("[tokenizer]\nvocabulary = 99999999999\n[sources.prose]\nweight = 1", "must be at most"),
        ("[tokenizer]\nvocab = 1000\n[sources.prose]\nweight = 1", "did you mean 'vocabulary'"),
        ("sources = 3", "needs at least one"),
        ("held_out =", "cannot be read as TOML"),
        ("", "needs at least one"),
    ],
)
def test_refuses(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_mix(str(path))
    assert str(path) in str(caught.value)


def test_a_mix_that_is_not_there():
    with pytest.raises(InputError, match="no such mix; did you mean 'quickstart'"):
        load_mix("quikstart")
    with pytest.raises(InputError, match="no such file"):
        load_mix("nowhere/mix.toml")
