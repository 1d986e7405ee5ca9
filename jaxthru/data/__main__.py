"""python -m jaxthru.data: prepare the token stores of a mix, or look into them."""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import rich.box
import rich.console
import rich.table
import rich.text

from jaxthru.data.loading import preview
from jaxthru.data.loading.dataset import Data, DataConfig, open_data
from jaxthru.data.mixture import epochs
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing_whole import OverLong
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.data.store.report import FEW
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime import command_line
from jaxthru.runtime.errors import NAMED, exit_code, require, shown


def main(argv: list[str] | None = None, prog: str = "python -m jaxthru.data") -> int:
    """Runs the command; returns its exit code: 2 for bad input, 130 for Ctrl-C."""
    arguments = _parser(prog).parse_args(argv)
    return exit_code(lambda: arguments.run(arguments))


def _prepare(arguments: argparse.Namespace) -> int:
    config = None if arguments.sequence is None else _config(arguments)  # what is wrong with it is told first
    mix = load_mix(arguments.mix, arguments.tokenizer)
    stores = open_stores(mix, Path(arguments.store)).stores
    largest = sorted(stores.values(), key=lambda opened: -opened.train.tokens)
    for opened in stores.values() if len(stores) <= FEW else largest[:NAMED]:
        print(f"{opened.folder}: {opened.train.tokens} tokens, {opened.held_out.tokens} held out")
    if len(stores) > FEW:
        splits = ([getattr(opened, split).tokens for opened in largest] for split in ("train", "held_out"))
        tokens, held_out = map(sum, splits)
        print(f"{arguments.store}: {len(stores)} stores, {tokens} tokens, {held_out} held out")
    tokens = {name: opened.train.tokens for name, opened in stores.items()}
    documents = {name: opened.train.documents for name, opened in stores.items()}
    each = epochs.in_one_pass(mix.mixture, tokens, documents)
    if often := epochs.repeated(each, "while as many tokens are read as there are"):
        print(often, file=sys.stderr)
    if config is not None:
        with open_data(config) as data:
            rows = sum(packed.rows for _, packed in data.train)
            print(f"{arguments.store}: {rows} rows of {arguments.sequence} tokens ({arguments.packing})")
    return 0


def _config(arguments: argparse.Namespace) -> DataConfig:
    names = ("mix", "sequence", "packing", "over_long", "store", "tokenizer")
    return DataConfig(**{name: getattr(arguments, name) for name in names})


def _look(arguments: argparse.Namespace, show: Callable[[Data, int], None]) -> int:
    require(arguments.rows >= 0, f"--rows {arguments.rows}: must not be negative")
    with open_data(_config(arguments)) as data:
        show(data, arguments.rows)
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = command_line.parser(
        prog, "Prepares the token stores of a mix, or looks into them.", "inspect quickstart"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable, says: str, does: str) -> argparse.ArgumentParser:
        ending = command_line.ending(f"{prog} {name}", "quickstart")
        command = commands.add_parser(name, help=says, description=does, **ending)
        command.set_defaults(run=run)
        command.add_argument("mix", help="a .toml path, or a name in data/mixes")
        command.add_argument("--store", default=DataConfig.store, metavar="DIR", help="default: %(default)s")
        tokenizer = "a folder of published weights, or a tokenizer.json, instead of the mix's"
        command.add_argument("--tokenizer", metavar="PATH", help=tokenizer)
        return command

    prepare = add(
        "prepare",
        _prepare,
        "make the token stores that are missing",
        "Makes the token stores that are missing, and with --sequence the packing of their rows.",
    )
    inspect = add(
        "inspect",
        functools.partial(_look, show=_inspect),
        "prepare, verify, and show sizes and sample rows",
        "Prepares a mix, verifies its stores, and shows sizes and sample rows.",
    )
    looked = add(
        "preview",
        functools.partial(_look, show=_preview),
        "rows as they are trained on, with what is trained on in colour",
        "Prepares a mix, and shows rows as they are trained on: documents, what of them counts, padding.",
    )
    prepare.add_argument("--sequence", type=int, help="tokens in a row; without it no packing is made")
    for command in (inspect, looked):
        option = command.add_argument
        option(
            "--sequence", type=int, default=DataConfig.sequence, help="tokens in a row; default: %(default)s"
        )
        option("--rows", type=int, default=1, help="sample rows of each source; default: %(default)s")
    for command in (prepare, inspect, looked):
        option = command.add_argument
        option("--packing", choices=("split", "best_fit"), default=DataConfig.packing)
        longer = "what becomes of a conversation longer than a row; default: %(default)s"
        option("--over-long", choices=get_args(OverLong), default=DataConfig.over_long, help=longer)
    return parser


def _inspect(data: Data, rows: int) -> None:
    console = rich.console.Console()
    console.print(_table(data))
    for line in data.account:
        console.print(shown(line), markup=False, highlight=False, soft_wrap=True)
    console.print(shown(_borders(data.tokenizer)), markup=False, highlight=False, soft_wrap=True)
    for opened in data.prepared.stores.values():
        opened.verify()
    console.print("All checksums agree.")
    for number, name in enumerate(data.names):
        with data.train_batches(
            ((0, Mixture.plain({name: 1.0})),), seed=0, rows=max(rows, 1), steps=min(rows, 1)
        ) as batches:
            for batch in batches:
                for row in range(rows):
                    assert (batch["source"][row] == number).all()
                    console.rule(rich.text.Text(f"{name}, row {row + 1}"))
                    preview.print_row(console, preview.decoded(data, batch, row))


def _preview(data: Data, rows: int) -> None:
    console = rich.console.Console()
    for line in data.account:
        console.print(shown(line), markup=False, highlight=False, soft_wrap=True)
    for number, name in enumerate(data.names):
        batch = preview.sample(data, number, rows)
        for row in range(len(batch["tokens"])):
            console.rule(rich.text.Text(f"{name}, row {row + 1}"))
            console.print(preview.counts(batch, row), highlight=False, soft_wrap=True)
            preview.print_row(console, preview.decoded(data, batch, row))


def _table(data: Data) -> rich.table.Table:
    mix = data.prepared.mix
    shares, caption = _shares(data.mixture)
    table = rich.table.Table(
        box=None,
        padding=(0, 1, 0, 0),
        title=rich.text.Text(shown(f"{mix.path.stem}: {mix.description}")),
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("source", no_wrap=True)
    for column in ("share", "docs", "tokens", "MB", "held-out\ntokens", "held-out\nrows", "damaged"):
        table.add_column(column, justify="right")
    for name, opened, (_, packing) in zip(
        data.names, data.prepared.stores.values(), data.held_out, strict=True
    ):
        shards = opened.manifest["shards"]
        table.add_row(
            *(rich.text.Text(name), shares[name]),
            *(f"{opened.train.documents + opened.held_out.documents:,}", f"{opened.train.tokens:,}"),
            f"{sum(shard['bytes'] for shard in shards) / 1e6:,.2f}",
            *(f"{opened.held_out.tokens:,}", f"{packing.rows:,}"),
            f"{sum(shard['damaged'] for shard in shards):,}",
        )
    return table


def _shares(mixture: Mixture) -> tuple[dict[str, str], str]:
    """Returns each source's share at each point of the schedule and its cap, and what these count."""
    points = sorted({at for share in mixture.shares.values() for at, _ in share.points})
    weights = [mixture.weights(at, 1) for at in points]
    shown = {}
    for name, share in mixture.shares.items():
        parts = [" → ".join(f"{at[name] / sum(at.values()):.3f}" for at in weights)]
        if share.max_epochs is not None:
            parts.append(f"at most {share.max_epochs:g} epochs, then {share.exhausted}")
        if share.max_tokens is not None:
            parts.append(f"at most {share.max_tokens:,.0f} tokens, then {share.exhausted}")
        shown[name] = "\n".join(parts)
    caption = f"Shares are of {mixture.count}"
    if mixture.changes:
        caption += f", {mixture.interpolate}, at {mixture.unit} " + ", ".join(f"{at:,.0f}" for at in points)
    return shown, caption + "."


def _borders(tokenizer: Tokenizer) -> str:
    """Returns in one line which tokenizer it is, and what each document begins and ends with."""
    bos, end = tokenizer.borders
    begins = f"begins with {bos} ({tokenizer.bos}) and " if bos else ""
    said = f"Each document {begins}ends with {end} ({tokenizer.end_of_text})."
    return f"Tokenizer {tokenizer.path}, of {tokenizer.vocabulary:,} tokens. {said}"


if __name__ == "__main__":
    sys.exit(main())
