"""Commands `atma-sweep data`, which prepare, list and verify text: parse, call one function, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...model.bounds import MAX_COUNT, MAX_LENGTH, MAX_TOKENS
from ...results import runs_folder
from ...results.console.command_line import AsJson, Cells, Db, Documented, Runs, print_json, print_result
from ...results.console.streams import terminal_width
from ...results.console.text import echo_text, sanitize_all
from ..completion import grids

Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="Python file that registers corpora of your own; repeatable."),
]
data_app = typer.Typer(
    help="""Prepare, list and verify corpora.

    \b
    Example:
      atma-sweep data prepare --grid quick
      atma-sweep data list
    """,
    no_args_is_help=True,
)


@data_app.command("prepare")
@Documented
def data_prepare(
    what: Annotated[str | None, typer.Argument()] = None,
    grid: Annotated[str | None, typer.Option(autocompletion=grids)] = None,
    name: str | None = None,
    tokenizer: str | None = None,
    tokenizer_file: Path | None = None,
    end_of_text: str | None = None,
    tokens: Annotated[float | None, typer.Option(min=1, max=MAX_TOKENS)] = None,
    heldout: str | None = None,
    heldout_tokens: Annotated[int | None, typer.Option(min=2, max=MAX_LENGTH)] = None,
    validation_tokens: Annotated[float | None, typer.Option(min=1, max=MAX_TOKENS)] = None,
    heldout_documents: Annotated[int | None, typer.Option(min=0, max=MAX_COUNT)] = None,
    path: Path | None = None,
    column: str | None = None,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    plugin: Plugins = None,
    most: Cells = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into shards, or adopt existing shards. Run again to continue after a stop.

    \b
    Example:
      atma-sweep data prepare --grid quick
      atma-sweep data prepare stdlib --tokens 1e5 --name small
      atma-sweep data prepare texts --validation-tokens 1e6 --name mine
      atma-sweep data prepare hf:roneneldan/TinyStories --name stories

    Args:
        what (NAME|PATH|hf:OWNER/NAME): A known corpus (data list --known), a file or folder of text or of shards, or a
            dataset of the Hugging Face hub.
        grid (GRID): Prepare what this grid needs, instead of NAME or PATH.
        name (NAME): Name of the prepared corpus, which a grid refers to as data.corpus: NAME.
        tokenizer (NAME): bytes, gpt2 or json.
        tokenizer_file (FILE): File of the tokenizer.
        end_of_text (TOKEN): Token that ends a text, if the tokenizer's file has an unusual name for it.
        tokens (N): Number of training tokens, such as 1e9; default: all, or the grid's number.
        heldout (NAME|PATH): Corpus or path from which the long documents of the probes are taken.
        heldout_tokens (N): Minimum number of tokens of a long document; default: 65601.
        validation_tokens (N): Tokens of the validation split of your own text; default: 5% of the text, at most
            2,097,153.
        heldout_documents (N): Maximum number of long documents of your own text to hold out; default: 16, and
            at most a quarter of the text.
        path (PATH): Local copy of a known corpus or dataset, to use instead of a download.
        column (NAME): Field of JSON lines, or column of Parquet files and datasets, that holds the text; default: text.
        config (NAME): Config of a dataset of the hub; default: its only one.
        split (NAME): Split of a dataset of the hub; default: train.
        revision (COMMIT): Commit, tag or branch of a dataset of the hub; default: the main branch.
    """
    from ..data import corpora
    from ..data.prepare import prepare as prepare_text
    from ..grid.plugins import load_plugins
    from ..orchestrator.display import SafeConsole
    from . import data_display

    loaded = load_plugins(plugin or [])
    root = runs_folder(runs, db, write=True) / "corpora"
    settings = {
        "tokenizer": tokenizer,
        "tokenizer_file": str(data_display.resolve_path(tokenizer_file)) if tokenizer_file else None,
        "end_of_text": end_of_text,
        "train_tokens": tokens,
        "validation_tokens": validation_tokens,
        "heldout_documents": heldout_documents,
        "heldout": data_display.parse_heldout(heldout),
        "heldout_tokens": heldout_tokens,
        "path": str(data_display.resolve_path(path)) if path else None,
        "column": column,
    }
    dataset = {"config": config, "split": split, "revision": revision}
    console = SafeConsole(stderr=as_json, soft_wrap=True)
    folders = []
    for data in data_display.configs_to_prepare(grid, what, settings, name, root, most, loaded, dataset):
        with data_display.PrepareDisplay(console, data.corpus) as tell:
            folders.append(prepare_text(data, root, name=name, report=tell))
    rows = corpora.listing(root, fingerprints=folders)
    print_result(
        rows, data_display.corpora_table(sanitize_all(rows), root, terminal_width(sys.stdout)), as_json=as_json
    )


@data_app.command("tokenizer")
@Documented
def data_tokenizer(
    text: Path,
    out: Annotated[Path, typer.Option()],
    size: Annotated[int, typer.Option(min=257, max=65_536)] = 4096,
    single_digits: bool = False,
    column: str = "text",
) -> None:
    """Train a byte-pair tokenizer on text. The same text gives the same file.

    \b
    Example:
      atma-sweep data tokenizer texts --size 4096 --out bpe.json

    Args:
        text (PATH): File or folder of text.
        out (FILE): JSON file to write.
        size (N): Number of tokens, including the bytes and the end of a text.
        single_digits: Make every digit a separate token, so that numbers are read digit by digit.
        column (NAME): Field of JSON lines, or column of Parquet files, that holds the text.
    """
    from ...results.console.output_files import write_file
    from ..data.byte_pairs import byte_pairs
    from ..data.sources import FileSource
    from ..orchestrator.display import SafeConsole
    from . import data_display

    source = FileSource(data_display.resolve_path(text), setting="PATH", column=column)
    source.key()  # raises at once for a path without text
    SafeConsole(soft_wrap=True).print(f"reading {text}; about a minute per 100 MB", highlight=False, markup=False)
    trained_tokenizer = byte_pairs(
        (document.text for document in source.documents()), size, single_digits=single_digits
    )
    write_file(out, trained_tokenizer.to_str(pretty=True))
    echo_text(f"{out}: {trained_tokenizer.get_vocab_size():,} tokens")


@data_app.command("list")
@Documented
def data_list(
    known: bool = False, plugin: Plugins = None, runs: Runs = None, db: Db = None, as_json: AsJson = False
) -> None:
    """List the corpora that are prepared for a database.

    \b
    Example:
      atma-sweep data list
      atma-sweep data list --known

    Args:
        known: Instead list the corpora that can be prepared by name.
    """
    from ..data import corpora
    from ..data.registry import all_kinds
    from ..grid.plugins import load_plugins
    from . import data_display

    root = runs_folder(runs, db) / "corpora"
    load_plugins(plugin or [])
    if known:
        kinds = all_kinds()
        rows: Any = [{"corpus": name, "description": kind.description} for name, kind in kinds.items()]
        lines = [f"{name:<20} {kind.description}" for name, kind in kinds.items()]
    else:
        rows = corpora.listing(root)
        lines = data_display.corpora_table(sanitize_all(rows), root, terminal_width(sys.stdout))
    print_result(rows, lines, as_json=as_json)


@data_app.command("verify")
@Documented
def data_verify(
    what: Annotated[str | None, typer.Argument()] = None,
    plugin: Plugins = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Read every token of prepared corpora, and compare hashes and fingerprints with those of the preparation.

    Exit code 1: something differs.

    \b
    Example:
      atma-sweep data verify

    Args:
        what (NAME|CORPUS|FINGERPRINT): Corpus as data list shows it; default: all prepared corpora.
    """
    from ..data import corpora
    from ..grid.plugins import load_plugins

    load_plugins(plugin or [])
    root = runs_folder(runs, db) / "corpora"
    folders = corpora.find_folders(root, what) if what else corpora.folders(root)
    rows = [{"folder": str(folder), "problems": corpora.verify(folder)} for folder in folders]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            echo_text("\n".join(row["problems"]) if row["problems"] else f"{row['folder']}: unchanged")
        if not rows:
            echo_text(f"no corpus is prepared in {root}")
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)
