"""Admission of a plan: room for its cells on the machines, disk for what stays of them, and text that is prepared and large enough."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...results.console.text import counted
from ...results.store.store import default_runs
from ..checkpoints import file_names, storage
from ..config import CellConfig, DataConfig, EvalConfig
from ..data import corpora
from ..data import tokenizer as tokenizers
from ..data.corpora import Corpus, CorpusError
from ..data.prepare import ProgressFn, aside, prepare
from ..data.registry import CORPORA
from ..errors import MachineError, SweepError
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..grid.validate import base_of
from ..host.allocation import Machine, MachineAllocator, is_type, need
from ..host.hardware import PRECISIONS, Gpu
from ..probes import bound
from ..probes.base import WHO, DocumentProbe
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


def expand_grid(
    grid: Grid, root: Path, *, dry: bool = False, download: bool = False, tell: ProgressFn = quiet
) -> tuple[list[Cell], list[str]]:
    """The grid's cells with their corpora pinned, and remarks. `root` holds the prepared corpora.

    Text on this machine is prepared when it is not yet, a download has to be allowed with `download`. A dry run prepares
    nothing: where the text is not prepared, ids are provisional, and a remark says so.
    """
    remarks: list[str] = []

    @functools.cache
    def prepared(name: str) -> corpora.PreparedCorpus | None:
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
        return corpora.provisional_fingerprint(data)

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


def check_corpora(cells: Sequence[Cell], root: Path, *, dry: bool = False) -> None:
    """Compares the prepared corpora with what the cells ask, before any process starts.

    A dry run leaves out what is not prepared, and reads no token of the rest: sizes stand in its manifest.
    Raises CorpusError with everything that `corpus_lacks` returns, in one line, or ShardError for a damaged corpus.
    """
    sentences = corpus_lacks(cells, root, dry=dry)
    if sentences:
        raise CorpusError("; ".join(sentences))


def corpus_lacks(cells: Sequence[Cell], root: Path, *, dry: bool = False) -> list[str]:
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
        lacking.setdefault(number, {}).update(dict.fromkeys(corpus_problems(config, corpus)))
        _, _, validation, documents = needs.get(number, (data, corpus, 0, 0))
        reads = any(isinstance(bound(name, config), DocumentProbe) for name in config.eval.probes)
        needs[number] = (
            data,
            corpus,
            max(validation, validation_need(config)),
            max(documents, config.eval.documents if reads else 0),
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


def corpus_problems(config: CellConfig, corpus: Corpus) -> list[str]:
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


KEPT_PARTS = {"nothing": "nothing", "weights": "weights", "everything": "weights and checkpoints"}


@dataclass(frozen=True)
class DiskUsage:
    """Bytes. Cells whose settings differ need different amounts, so those of one cell are the smallest and largest."""

    cells: int
    """How many would be trained."""
    per_cell: tuple[int, int]
    """What stays of a finished one."""
    kept: int
    """What stays of all of them."""
    running: int
    """What a running one takes at most: two checkpoints, and a third while it is written."""
    free: int | None
    """None when the place is on no disk of this machine."""
    place: str
    keep: tuple[str, ...]
    """Values of checkpoint.keep among the cells."""

    @property
    def is_short(self) -> bool:
        """Tell whether all that stays, and one running cell, are more than is free."""
        return self.cells > 0 and self.free is not None and self.kept + self.running > self.free

    def describe(self) -> list[str]:
        """One line, and a warning when it will not do; nothing without cells."""
        if not self.cells:
            return []
        least, most = (size(value) for value in self.per_cell)
        parts = " or ".join(KEPT_PARTS[word] for word in self.keep)
        number, unit = least.split()
        each = most if least == most else f"{number} to {most}" if most.endswith(f" {unit}") else f"{least} to {most}"
        stays = (
            f"{each} of {parts} a cell, {size(self.kept)} for {counted(self.cells, 'cell')}"
            if self.kept
            else "nothing stays"
        )
        free = f"{size(self.free)} free in {self.place}" if self.free is not None else f"in {self.place}"
        lines = [
            f"disk: {stays} (checkpoint.keep: {', '.join(self.keep)}); "
            f"while training up to {size(self.running)} a running cell; {free}"
        ]
        if self.is_short and self.free is not None:
            lines.append(
                f"warning: {size(self.kept)} to keep and {size(self.running)} while training are more than the "
                f"{size(self.free)} free in {self.place}; make room, set checkpoint.keep to nothing, or name another "
                "place with checkpoint.path"
            )
        return lines

    def as_json(self) -> dict[str, int | None]:
        """The numbers, by the names that `launch --dry-run --json` gives them."""
        return {
            "disk_bytes_per_cell": self.per_cell[1],
            "disk_bytes_kept": self.kept,
            "disk_bytes_running": self.running,
            "disk_bytes_free": self.free,
        }


def disk_needed(cells: Sequence[Cell], runs: Path) -> DiskUsage:
    """What training these cells needs; those that share a model section are counted once.

    Names and headers, some 400 bytes a tensor, are left out. Raises AddressError and StorageError for a checkpoint.path
    that cannot be used.
    """
    # imports torch, which commands that plan nothing do not wait for
    from ..checkpoints.checkpoint import sizes

    counted: dict[tuple[int, bool, str], tuple[int, int]] = {}
    each, running = [], 0
    for cell in cells:
        config = cell.config
        narrow = config.train.activations_on(cuda=config.resources.gpus > 0) == "bfloat16"
        key = id(config.model), narrow, config.train.optimizer  # which the cells keep alive
        if key not in counted:
            counted[key] = sizes(config.model, narrow=narrow, optimizer=key[2])
        weights, optimizers = counted[key]
        whole = weights + optimizers
        stays = {"nothing": 0, "weights": weights, "everything": weights + file_names.KEPT * whole}
        each.append(stays[config.checkpoint.keep])
        running = max(running, (file_names.KEPT + 1) * whole)
    place = storage.resolve(runs, storage.home(cells[0].config.checkpoint.path, "") if cells else "").rstrip("/")
    return DiskUsage(
        cells=len(cells),
        per_cell=(min(each, default=0), max(each, default=0)),
        kept=sum(each),
        running=running,
        free=storage.free_bytes(place),
        place=place,
        keep=tuple(sorted({cell.config.checkpoint.keep for cell in cells})),
    )


def check_placement(cells: Sequence[Cell], *machines: Machine, held: Sequence[Gpu] = ()) -> None:
    """Refuses cells that fit on none of the machines even while nothing else runs there; `held`: GPUs that another sweep has.

    Raises MachineError naming the need and what there is, SweepError for a precision that a GPU does not have.
    """
    _check_precisions(cells, [gpu for machine in machines for gpu in machine.gpus])
    rooms = [MachineAllocator(machine) for machine in machines]
    never = [cell for cell in cells if all(room.place(cell.config.resources) is None for room in rooms)]
    if not never:
        return
    more = f" (and {counted(len(never) - 1, 'more cell')})" if len(never) > 1 else ""
    others = f"; another sweep holds {', '.join(gpu.name for gpu in held)}" if held else ""
    have = (
        f"this machine has {machines[0]}" if len(machines) == 1 else f"the nodes have {'; '.join(map(str, machines))}"
    )
    raise MachineError(
        f"cell {never[0].slug}{more} needs {need(never[0].config.resources)}, and {have}{others}; "
        "change resources in the grid, or launch where there is more"
    )


def _check_precisions(cells: Sequence[Cell], gpus: Sequence[Gpu]) -> None:
    """Refuses fp8 where an attempt might be given a GPU without it. bf16 runs everywhere, slower before 8.0."""
    major, minor = least = PRECISIONS["fp8"]
    for cell in cells:
        resources = cell.config.resources
        if cell.config.train.precision != "fp8" or not resources.gpus:
            continue
        for gpu in gpus:
            if gpu.capability is not None and gpu.capability < least and is_type(gpu.name, resources.gpu_type):
                has = ".".join(map(str, gpu.capability))
                raise SweepError(
                    f"cell {cell.slug}: train.precision is fp8, which needs compute capability {major}.{minor} (Ada, "
                    f"Hopper and later), and {gpu.name} has {has}; set train.precision to bf16, or resources.gpu_type "
                    "to a GPU that has it"
                )
