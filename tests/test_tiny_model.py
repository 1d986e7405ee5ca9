"""The folder that scripts/tiny_model.py makes is one of published weights, with its own chat template."""

import json
import runpy
from pathlib import Path

from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.huggingface.config import read_config
from jaxthru.huggingface.weights import Weights

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tiny_model.py"
HELLO = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "A row."}]


def test_it_is_a_whole_folder_and_made_once(tmp_path, capsys):
    main, folder = runpy.run_path(str(SCRIPT))["main"], tmp_path / "tiny"
    assert main([str(folder), "--seed", "1"]) == 0
    model, raw = read_config(folder)
    Weights(folder, model)  # every tensor is accounted for
    tokenizer = Tokenizer.of(folder, talks=True)
    assert tokenizer.vocabulary == model.vocabulary
    rendered = tokenizer.chat_template.render(HELLO)
    ids = tokenizer.encode_documents([Said(rendered)])[0]
    assert tokenizer.decode(ids.ids[ids.trained]) == "A row.<|im_end|>"
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert raw["eos_token_id"] == ends and tokenizer.decode(ends) == "<|im_end|><|endoftext|>"
    assert main([str(folder)]) == 2
    assert "tiny: " in capsys.readouterr().err


class Said:
    """What is read of a document that a template wrote."""

    def __init__(self, rendered):
        self.text, self.trained, self.literal = rendered
        self.rendered = True
