"""The text that a grid needs: found or prepared before any process starts, and checked against what its cells ask."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...results.store.store import default_runs
from ..config import CellConfig, DataConfig, EvalConfig
from ..data import corpora
from ..data import tokenizer as tokenizers
from ..data.corpora import Corpus, CorpusError
from ..data.prepare import Tell, aside, prepare
from ..data.registry import CORPORA
from ..errors import MachineError
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..grid.validate import base_of
from ..probes import bound
from ..probes.base import WHO, OverDocuments
from ..units import size

UNPREPARED = "is not prepared in"
UNCHECKED = "until then ids are provisional and its size is not checked"


def quiet(told: object) -> None:
    """For callers that want no progress."""


@dataclass(frozen=True)
class Unprepared:
    """Text that cells need and a launch does not get unless it is told to."""

    corpus: str
    problem: str
    command: str
    """Prepares it."""
    alternative: str = ""
    """A change of the grid that does without it."""
    tokens: int | None = None
    """Training tokens; None for all that there are."""
    bytes: int | None = None
    """Estimate of the download; None where that is unknown."""


def expand(
    grid: Grid, root: Path, *, dry: bool = False, download: bool = False, tell: Tell = quiet
) -> tuple[list[Cell], list[str]]:
    """The grid's cells with their corpora pinned, and remarks. `root` holds the prepared corpora.

    Text on this machine is prepared when it is not yet, a download has to be allowed with `download`. A dry run prepares
    nothing: where the text is not prepared, ids are provisional, and a remark says so.
    """
    remarks: list[str] = []

    @functools.cache
    def prepared(name: str) -> corpora.Prepared | None:
        return corpora.prepared(name, root)

    def pin(data: DataConfig) -> str:
        known = prepared(data.corpus) if data.corpus not in CORPORA else None
        found = known.fingerprint if known is not None else corpora.find(data, root)
        if found is not None:
            return found
        if not dry and (download or not _downloads(data)):
            return prepare(data, root, tell=tell)
        if dry and (small := _at_hand(data)) is not None:
            return small.fingerprint
        how = f"corpus {data.corpus!r} {UNPREPARED} {root}: {_command(grid, root)}"
        if not dry:
            raise MachineError(how)
        remarks.append(f"{how}; {UNCHECKED}")
        return corpora.provisional(data)

    return grid.expand(pin, prepared), remarks


def _command(grid: Grid, root: Path) -> str:
    words = ["atma-sweep", "data", "prepare", "--grid", grid.short_path]
    if root.parent != default_runs().absolute():
        words += ["--runs", str(root.parent)]
    return shlex.join(words)


def _downloads(data: DataConfig) -> list[DataConfig]:
    """Return the corpora that preparing `data` would download: its own, and the one that lends long documents."""
    lender = data.heldout
    lent = [DataConfig(corpus=lender)] if lender is not None and lender in CORPORA else []
    return [section for section in (data, *lent) if CORPORA.load(section.corpus).remote(section)]


def unprepared(cells: Sequence[Cell], grid: Grid, root: Path) -> list[Unprepared]:
    """Return the text of these cells, as a dry run expands them, that is not prepared and that a launch does not get."""
    sections = {id(cell.config.data): cell.config.data for cell in cells}.values()
    open_ = {data: None for data in sections if (data.fingerprint or "").startswith(corpora.PROVISIONAL)}
    return [lack for data in open_ if (lack := _unprepared(data, grid, root)) is not None]


def _unprepared(data: DataConfig, grid: Grid, root: Path) -> Unprepared | None:
    downloads, command = _downloads(data), _command(grid, root)
    if not downloads:
        trouble = _tokenizer_trouble(data.tokenizer, data.tokenizer_file, data.end_of_text)
        return None if trouble is None else Unprepared(data.corpus, f"corpus {data.corpus!r}: {trouble}", command)
    sizes = [CORPORA.load(section.corpus).download_bytes(section) for section in downloads]
    total = None if None in sizes else sum(filter(None, sizes))
    volume = f"about {size(total)} to download" if total is not None else "a download of unknown size"
    if downloads[0].corpus == data.corpus:
        amount = f"{data.train_tokens:,} training tokens" if data.train_tokens is not None else "all of it"
        long = f" and long documents of {data.heldout!r}" if len(downloads) > 1 else ""
        problem = f"corpus {data.corpus!r} is not prepared in {root}: {amount}{long}, {volume}"
        return Unprepared(data.corpus, problem, command, "", data.train_tokens, total)
    # the corpus itself lies on this machine, and only its lender of long documents does not
    setting, name = grid.setting("data.heldout"), grid.document.path.name
    origin = f"an axis of {name}" if setting is None else f"{setting.file}:{setting.line}"
    if setting is not None and (base := base_of(setting, grid.document.path)) is not None:
        origin = f"inherited from base {base}, {origin}"
    problem = f"data.heldout: {data.heldout} ({origin}), which lends corpus {data.corpus!r} long documents, is not prepared in {root}: {volume}"
    alternative = f"or set data.heldout: null in {name}, and documents of {data.corpus!r} itself are held out"
    return Unprepared(data.corpus, problem, command, alternative, data.train_tokens, total)


@functools.cache
def _tokenizer_trouble(name: str, file: str | None, end_of_text: str | None) -> str | None:
    """Return why this machine does not get a tokenizer, which it is asked for once; None for one that it has or gets."""
    try:
        tokenizers.load_tokenizer(name, file, end_of_text)
    except MachineError as error:
        return str(error)
    return None


_aside = functools.cache(aside)  # asked for once for its fingerprint, and again to be checked


def _at_hand(data: DataConfig) -> Corpus | None:
    """The text of a config that even a dry run may prepare, which leaves nothing behind; None for any other."""
    small = data.heldout is None and data.corpus in CORPORA and CORPORA.load(data.corpus).at_hand
    if small and CORPORA.load(data.corpus).tokenizer is None:
        small = _tokenizer_trouble(data.tokenizer, data.tokenizer_file, data.end_of_text) is None
    return _aside(data.model_copy(update={"fingerprint": None})) if small else None


def check(cells: Sequence[Cell], root: Path, *, dry: bool = False) -> None:
    """Compares the prepared corpora with what the cells ask, before any process starts.

    A dry run leaves out what is not prepared, and reads no token of the rest: sizes stand in its manifest.
    Raises CorpusError with everything that `lacks` returns, in one line, or ShardError for a damaged corpus.
    """
    sentences = lacks(cells, root, dry=dry)
    if sentences:
        raise CorpusError("; ".join(sentences))


def lacks(cells: Sequence[Cell], root: Path, *, dry: bool = False) -> list[str]:
    """Return what the prepared corpora lack for these cells: a sentence for each lack, and one for the preparation that mends several.

    A dry run leaves out what is not prepared, and reads no token of the rest: sizes stand in its manifest.
    Raises CorpusError or ShardError for a corpus that is damaged or gone.
    """
    opened: dict[str, Corpus | None] = {}
    seen = set()
    words: dict[int, str] = {}
    lacking: dict[str, dict[str, None]] = {}
    needs: dict[str, tuple[DataConfig, Corpus, int, int]] = {}

    def word(section: DataConfig | EvalConfig) -> str:
        # thousands of cells share one section, whose JSON takes longer than all the rest
        if id(section) not in words:
            words[id(section)] = section.model_dump_json()
        return words[id(section)]

    for config in (cell.config for cell in cells):
        data, train = config.data, config.train
        asked = (
            word(data),
            train.seq_len,
            train.batch_tokens,
            train.loss_on,
            config.model.vocab_size,
            word(config.eval),
        )
        if asked in seen:
            continue
        seen.add(asked)
        number = data.fingerprint or ""
        if number not in opened:
            opened[number] = _opened(data, root) if dry else corpora.verified(root, number)
        corpus = opened[number]
        if corpus is None:
            continue
        lacking.setdefault(number, {}).update(dict.fromkeys(problems(config, corpus)))
        _, _, validation, documents = needs.get(number, (data, corpus, 0, 0))
        needs[number] = (
            data,
            corpus,
            max(validation, validation_need(config)),
            max(documents, _document_need(config)),
        )
    report = []
    for number, sentences in lacking.items():
        data, corpus, validation, documents = needs[number]
        report += [f"corpus {data.corpus!r}: {sentence}" for sentence in sentences]
        if sentences and (remedy := _preparation(data, corpus, validation, documents)) is not None:
            report.append(remedy)
    return report


def validation_need(config: CellConfig) -> int:
    """Return the tokens of the validation split that a cell reads: its validation loss, and its probes at the longest length."""
    train, evaluation = config.train, config.eval
    loss = evaluation.validation_tokens // train.seq_len * train.seq_len + 1
    probes = [bound(name, config) for name in evaluation.probes]
    return max([loss, *(probe.validation_need(max(evaluation.lengths)) for probe in probes)])


def _document_need(config: CellConfig) -> int:
    """Return the number of held-out documents that the probes of a cell read."""
    reads = any(isinstance(bound(name, config), OverDocuments) for name in config.eval.probes)
    return config.eval.documents if reads else 0


def _preparation(data: DataConfig, corpus: Corpus, validation: int, documents: int) -> str | None:
    """Return how to prepare own text so that its splits have the sizes; None where that is no remedy."""
    if data.corpus in CORPORA and not corpora.is_by_tokens(data):
        return None
    if corpus.computed or (data.corpus not in CORPORA and not corpora.is_divided(corpus)):
        return None
    options = []
    total = corpus.train_tokens + len(corpus.validation) + sum(map(len, corpus.heldout))
    if len(corpus.validation) < validation and (data.train_tokens is not None or validation < total):
        options.append(f"data.validation_tokens: {validation}")
    if len(corpus.heldout) < documents and data.heldout is None:
        options.append(f"data.heldout_documents: {documents}")
    if not options:
        return None
    command = " ".join(f"--{option.removeprefix('data.').replace('_', '-').replace(':', '')}" for option in options)
    return (
        f"to prepare the text with splits that are large enough, set {' and '.join(options)} "
        f"(atma-sweep data prepare ... {command})"
    )


def _opened(data: DataConfig, root: Path) -> Corpus | None:
    """The text of a cell as a dry run has it; None where that would have to be prepared."""
    number = data.fingerprint or ""
    return corpora.open_corpus(root, number) if corpora.is_prepared(number, root) else _at_hand(data)


def problems(config: CellConfig, corpus: Corpus) -> list[str]:
    """What a cell asks of its corpus and does not get, one sentence each with the setting that would ask for less."""
    from ..data.batches import DataError, training_batches

    found = []
    train, asked = config.train, config.eval
    if train.loss_on == "marked" and corpus.train_marks is None:
        found.append(corpora.UNMARKED)
    else:
        try:
            training_batches(config, corpus)
        except DataError as error:
            found.append(f"{error}: lower train.seq_len or train.batch_tokens, or give it more text")
    if corpus.largest >= config.model.vocab_size:
        found.append(
            f"holds token {corpus.largest}, but model.vocab_size is {config.model.vocab_size}: "
            f"raise it to {corpus.largest + 1} or more"
        )
    need = asked.validation_tokens // train.seq_len * train.seq_len + 1
    if need == 1:
        found.append(
            f"eval.validation_tokens is {asked.validation_tokens}, less than a row of {train.seq_len}: raise it"
        )
    elif len(corpus.validation) < need:
        found.append(
            f"the validation split has {len(corpus.validation)} tokens, eval.validation_tokens asks for {need}: lower it"
        )
    return found + _lacking(config, corpus)


def _lacking(config: CellConfig, corpus: Corpus) -> list[str]:
    """What the probes lack for the longest length; one sentence for all that lack the same."""
    lacking: dict[str, list[str]] = {}
    for name in config.eval.probes:
        probe = bound(name, config)
        lack = probe.lack(corpus, max(config.eval.lengths)) if probe.by_length else None
        if lack is not None:
            lacking.setdefault(lack, []).append(name)
    told = []
    for lack, names in lacking.items():
        who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        told.append(lack.replace(WHO, f"{who} {'reads' if len(names) == 1 else 'read'}"))
    return told
