"""Checks before a launch: machines that fit the cells, disk space for their files, and prepared text."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...results.console.quantities import format_bytes
from ...results.console.text import counted
from ...results.store.store import default_runs
from ..checkpoints import file_names, storage
from ..config import CellConfig, DataConfig, EvalConfig
from ..data import corpora
from ..data import tokenizer as tokenizers
from ..data.corpora import Corpus, CorpusError
from ..data.prepare import ProgressFn, prepare, prepare_in_memory
from ..data.registry import CORPORA
from ..errors import MachineError, SweepError
from ..grid.cell import Cell
from ..grid.grid import Grid
from ..grid.initial import PROVISIONAL as PROVISIONAL_WEIGHTS
from ..grid.validate import base_of
from ..host.allocation import Machine, MachineAllocator, format_resources, is_type
from ..host.hardware import PRECISIONS, Gpu
from ..probes import bound
from ..probes.base import PROBE_PLACEHOLDER, DocumentProbe
from .initial_weights import WeightsFinder, check_tokenizers

UNPREPARED = "is not prepared in"
"""Part of the remark on text that is not prepared; its callers search for it."""
WEIGHTS_ABSENT = "is not on this machine: until it is downloaded (launch --prepare), cell ids are provisional"
"""Rest of the remark on initial weights that are not on this machine, after their source."""
UNCHECKED = "until then cell ids are provisional and the corpus size is not checked"


def ignore_progress(progress: object) -> None:
    """Discard a progress report."""


@dataclass(frozen=True)
class Unprepared:
    """Text that cells need and that a launch would not download without permission."""

    corpus: str
    """Name of the corpus."""
    problem: str
    """Sentence on what is missing, without a full stop."""
    command: str
    """Command that prepares it."""
    alternative: str = ""
    """Change of the grid that makes the text unnecessary; "" without one."""
    tokens: int | None = None
    """Number of training tokens; None for all available."""
    bytes: int | None = None
    """Estimated bytes to download; None if unknown."""


def expand_grid(
    grid: Grid, root: Path, *, dry: bool = False, download: bool = False, tell: ProgressFn = ignore_progress
) -> tuple[list[Cell], list[str]]:
    """Return the grid's cells with their corpus fingerprints filled in, and remarks on unprepared text.

    A real launch first prepares text that needs no download (or any text, if `download` is set) and writes it to
    `root`. A dry run writes nothing: small text at hand is prepared in memory. Any other text gets a provisional
    fingerprint, so that the ids of its cells are provisional too.

    Args:
        grid: The grid.
        root: Folder of the prepared corpora.
        dry: True for a dry run.
        download: True allows downloads; ignored in a dry run.
        tell: Called with the progress of preparing text.

    Returns:
        (Cells in grid order, remarks). A remark is one sentence per unprepared text; without `dry` there are none.

    Raises:
        GridError: If the grid is not valid.
        MachineError: Without `dry`, if text is not prepared and would have to be downloaded. Errors of preparing text
            pass through.
    """
    remarks: list[str] = []

    @functools.cache
    def prepared(name: str) -> corpora.PreparedCorpus | None:
        """Return the corpus prepared under a name, or None; cached."""
        return corpora.find_prepared(name, root)

    def pin(data: DataConfig) -> str:
        """Return the fingerprint of a data section, preparing its text if that is allowed.

        Text that a dry run does not prepare gets a provisional fingerprint and a remark; otherwise MachineError is
        raised.
        """
        prepared_corpus = prepared(data.corpus) if data.corpus not in CORPORA else None
        fingerprint = (
            prepared_corpus.fingerprint if prepared_corpus is not None else corpora.find_fingerprint(data, root)
        )
        if fingerprint is not None:
            return fingerprint
        if not dry and (download or not _downloads(data)):
            return prepare(data, root, report=tell)
        if dry and (small := _instant_corpus(data)) is not None:
            return small.fingerprint
        hint = f"corpus {data.corpus!r} {UNPREPARED} {root}: {_command(grid, root)}"
        if not dry:
            raise MachineError(hint)
        remarks.append(f"{hint}; {UNCHECKED}")
        return corpora.provisional_fingerprint(data)

    cells = grid.expand(pin, prepared)
    if isinstance(grid.initial, WeightsFinder):
        check_tokenizers(cells, grid.initial)
        remarks += [f"{source} {WEIGHTS_ABSENT}" for source in _absent_sources(cells)]
    return cells, remarks


def _absent_sources(cells: Sequence[Cell]) -> list[str]:
    """Return the sources of initial weights that are not on this machine, each once, in cell order."""
    trains = {id(cell.config.train): cell.config.train for cell in cells}.values()
    sources = (train.init_from for train in trains if (train.init_sha256 or "").startswith(PROVISIONAL_WEIGHTS))
    return list(dict.fromkeys(source for source in sources if source is not None))


def _command(grid: Grid, root: Path) -> str:
    """Return the quoted shell command that prepares the grid's text, with `--runs` if `root` is not the default."""
    argv = ["atma-sweep", "data", "prepare", "--grid", grid.short_path]
    if root.parent != default_runs().absolute():
        argv += ["--runs", str(root.parent)]
    return shlex.join(argv)


def _downloads(data: DataConfig) -> list[DataConfig]:
    """Return the data sections that preparing `data` would download.

    Candidates are `data` itself and a section for the corpus named in `data.heldout`, in this order. Sections whose
    text is on this machine are excluded, and so is a `heldout` that is no registered corpus.
    """
    lender = data.heldout
    lent = [DataConfig(corpus=lender)] if lender is not None and lender in CORPORA else []
    return [section for section in (data, *lent) if CORPORA.load(section.corpus).remote(section)]


def unprepared(cells: Sequence[Cell], grid: Grid, root: Path) -> list[Unprepared]:
    """Return the text of these cells that a launch would not get by itself: one entry per data section.

    Only sections with a provisional fingerprint count, in cell order. Text that a launch can prepare from this machine
    is left out, unless its tokenizer cannot be loaded.

    Args:
        cells: Cells as a dry run expands them, with provisional fingerprints.
        grid: Their grid, for the command and the place of settings in messages.
        root: Folder of the prepared corpora, for messages and the command.
    """
    sections = {id(cell.config.data): cell.config.data for cell in cells}.values()
    provisional = {data: None for data in sections if (data.fingerprint or "").startswith(corpora.PROVISIONAL)}
    return [lack for data in provisional if (lack := _unprepared(data, grid, root)) is not None]


def _unprepared(data: DataConfig, grid: Grid, root: Path) -> Unprepared | None:
    """Return the unprepared text of a data section, or None if a launch can prepare it from this machine.

    Without a download, only a tokenizer that cannot be loaded is a problem; `tokens` and `bytes` are None then.
    Otherwise `bytes` is the sum over all downloads, None if the size of one is unknown. `alternative` is set only if
    the corpus itself is on this machine and just its source of long documents (`data.heldout`) is not.
    """
    downloads, command = _downloads(data), _command(grid, root)
    if not downloads:
        trouble = _tokenizer_trouble(data.tokenizer, data.tokenizer_file, data.end_of_text)
        return None if trouble is None else Unprepared(data.corpus, f"corpus {data.corpus!r}: {trouble}", command)
    sizes = [CORPORA.load(section.corpus).download_bytes(section) for section in downloads]
    total = None if None in sizes else sum(filter(None, sizes))
    volume = f"about {format_bytes(total)} to download" if total is not None else "a download of unknown size"
    if downloads[0].corpus == data.corpus:
        amount = f"{data.train_tokens:,} training tokens" if data.train_tokens is not None else "the complete corpus"
        long = f" and long documents of {data.heldout!r}" if len(downloads) > 1 else ""
        problem = f"corpus {data.corpus!r} is not prepared in {root}: {amount}{long}, {volume}"
        return Unprepared(data.corpus, problem, command, "", data.train_tokens, total)
    # the corpus is on this machine, but the source of its long documents is not
    setting, name = grid.setting("data.heldout"), grid.document.path.name
    origin = f"an axis of {name}" if setting is None else f"{setting.file}:{setting.line}"
    if setting is not None and (base := base_of(setting, grid.document.path)) is not None:
        origin = f"inherited from base {base}, {origin}"
    problem = f"data.heldout: {data.heldout} ({origin}), the source of long documents for corpus {data.corpus!r}, is not prepared in {root}: {volume}"
    alternative = f"or set data.heldout: null in {name} to hold out documents of {data.corpus!r} itself"
    return Unprepared(data.corpus, problem, command, alternative, data.train_tokens, total)


@functools.cache
def _tokenizer_trouble(name: str, file: str | None, end_of_text: str | None) -> str | None:
    """Return the reason why this machine cannot load a tokenizer, or None if it can.

    Cached by arguments, failures too. May download the tokenizer's file.
    """
    try:
        tokenizers.load_tokenizer(name, file, end_of_text)
    except MachineError as error:
        return str(error)
    return None


_prepare_in_memory = functools.cache(prepare_in_memory)  # called once for the fingerprint and again for the check


def _instant_corpus(data: DataConfig) -> Corpus | None:
    """Return the text of a data section that a dry run prepares in memory; None for all other text.

    It must be a registered corpus marked as at hand, without `data.heldout`, whose tokenizer can be loaded (unless the
    corpus brings its own). The result is cached by section, without its fingerprint.
    """
    small = data.heldout is None and data.corpus in CORPORA and CORPORA.load(data.corpus).at_hand
    if small and CORPORA.load(data.corpus).tokenizer is None:
        small = _tokenizer_trouble(data.tokenizer, data.tokenizer_file, data.end_of_text) is None
    return _prepare_in_memory(data.model_copy(update={"fingerprint": None})) if small else None


def check_corpora(cells: Sequence[Cell], root: Path, *, dry: bool = False) -> None:
    """Raise CorpusError if prepared corpora do not meet the cells' requirements, before any process starts.

    Args:
        cells: The cells.
        root: Folder of the prepared corpora.
        dry: True skips unprepared text and reads no tokens of the rest, only the sizes in its manifest.

    Raises:
        CorpusError: With all sentences of `corpus_lacks` in one line.
        ShardError: For a damaged corpus.
    """
    sentences = corpus_lacks(cells, root, dry=dry)
    if sentences:
        raise CorpusError("; ".join(sentences))


def corpus_lacks(cells: Sequence[Cell], root: Path, *, dry: bool = False) -> list[str]:
    """Return one sentence per requirement of the cells that a prepared corpus does not meet; empty if all are met.

    Each sentence starts with "corpus NAME: ", grouped by fingerprint in cell order, without duplicates. After the
    sentences of a corpus comes one on preparing it with larger splits, if that would help.

    Args:
        cells: The cells; each distinct combination of the relevant settings is checked once.
        root: Folder of the prepared corpora.
        dry: True skips unprepared text (except small text prepared in memory) and reads no tokens, only the sizes in
            the manifest. False verifies each corpus.

    Raises:
        CorpusError: For a corpus that has disappeared.
        ShardError: For a damaged corpus.
    """
    opened: dict[str, Corpus | None] = {}
    checked = set()
    json_texts: dict[int, str] = {}
    problems: dict[str, dict[str, None]] = {}
    needs: dict[str, tuple[DataConfig, Corpus, int, int]] = {}

    def json_text(section: DataConfig | EvalConfig) -> str:
        """Return a section as JSON, cached by identity."""
        # thousands of cells share one section, and its JSON takes longer than the rest
        if id(section) not in json_texts:
            json_texts[id(section)] = section.model_dump_json()
        return json_texts[id(section)]

    for config in (cell.config for cell in cells):
        data, train = config.data, config.train
        key = (
            json_text(data),
            train.seq_len,
            train.batch_tokens,
            train.loss_on,
            config.model.vocab_size,
            json_text(config.eval),
        )
        if key in checked:
            continue
        checked.add(key)
        fingerprint = data.fingerprint or ""
        if fingerprint not in opened:
            opened[fingerprint] = _opened(data, root) if dry else corpora.open_verified(root, fingerprint)
        corpus = opened[fingerprint]
        if corpus is None:
            continue
        problems.setdefault(fingerprint, {}).update(dict.fromkeys(corpus_problems(config, corpus)))
        _, _, validation, documents = needs.get(fingerprint, (data, corpus, 0, 0))
        reads = any(isinstance(bound(name, config), DocumentProbe) for name in config.eval.probes)
        needs[fingerprint] = (
            data,
            corpus,
            max(validation, validation_need(config)),
            max(documents, config.eval.documents if reads else 0),
        )
    report = []
    for fingerprint, sentences in problems.items():
        data, corpus, validation, documents = needs[fingerprint]
        report += [f"corpus {data.corpus!r}: {sentence}" for sentence in sentences]
        if sentences and (remedy := _preparation(data, corpus, validation, documents)) is not None:
            report.append(remedy)
    return report


def validation_need(config: CellConfig) -> int:
    """Return the validation tokens that a cell reads: the larger of the needs of its loss and of any of its probes.

    The loss needs `eval.validation_tokens` rounded down to whole rows of `train.seq_len`, plus one. A probe's need is
    that at the longest of `eval.lengths`.
    """
    train, evaluation = config.train, config.eval
    loss = evaluation.validation_tokens // train.seq_len * train.seq_len + 1
    probes = [bound(name, config) for name in evaluation.probes]
    return max([loss, *(probe.validation_need(max(evaluation.lengths)) for probe in probes)])


def _preparation(data: DataConfig, corpus: Corpus, validation: int, documents: int) -> str | None:
    """Return a sentence on how to prepare the text with larger splits; None if that does not help.

    It never helps for computed corpora, for those that are not split by tokens, or if both splits are large enough. A
    validation split larger than the whole text is proposed only if `data.train_tokens` limits the text. Held-out
    documents are not proposed where `data.heldout` lends them.

    Args:
        data: Data section of a cell.
        corpus: The prepared corpus, whose splits are compared with the requirements.
        validation: Required tokens of the validation split.
        documents: Required number of held-out documents.
    """
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
    """Return the corpus of a data section for a dry run; None if it would have to be prepared."""
    fingerprint = data.fingerprint or ""
    return corpora.open_corpus(root, fingerprint) if corpora.is_prepared(fingerprint, root) else _instant_corpus(data)


def corpus_problems(config: CellConfig, corpus: Corpus) -> list[str]:
    """Return one sentence per requirement of the cell that its corpus does not meet, with the setting to change.

    Checked in this order: loss marks (for `train.loss_on: marked`) or else at least one training batch; token ids below
    `model.vocab_size`; the validation split against `eval.validation_tokens`; the probes at the longest length.
    """
    from ..data.batches import DataError, training_batches

    problems = []
    train, evaluation = config.train, config.eval
    if train.loss_on == "marked" and corpus.train_marks is None:
        problems.append(corpora.UNMARKED)
    else:
        try:
            training_batches(config, corpus)
        except DataError as error:
            problems.append(f"{error}: lower train.seq_len or train.batch_tokens, or provide more text")
    if corpus.largest >= config.model.vocab_size:
        problems.append(
            f"holds token {corpus.largest}, but model.vocab_size is {config.model.vocab_size}: "
            f"raise it to {corpus.largest + 1} or more"
        )
    need = evaluation.validation_tokens // train.seq_len * train.seq_len + 1
    if need == 1:
        problems.append(
            f"eval.validation_tokens is {evaluation.validation_tokens}, less than one row of {train.seq_len} tokens: raise it"
        )
    elif len(corpus.validation) < need:
        problems.append(
            f"the validation split has {len(corpus.validation)} tokens, but eval.validation_tokens needs {need}: lower it"
        )
    return problems + _probe_shortfalls(config, corpus)


def _probe_shortfalls(config: CellConfig, corpus: Corpus) -> list[str]:
    """Return one sentence per shortage of the probes at the longest length, naming all probes that share it.

    Probes that do not depend on the context length are skipped.
    """
    lacking: dict[str, list[str]] = {}
    for name in config.eval.probes:
        probe = bound(name, config)
        lack = probe.lack(corpus, max(config.eval.lengths)) if probe.by_length else None
        if lack is not None:
            lacking.setdefault(lack, []).append(name)
    sentences = []
    for lack, names in lacking.items():
        subject = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        sentences.append(lack.replace(PROBE_PLACEHOLDER, f"{subject} {'reads' if len(names) == 1 else 'read'}"))
    return sentences


RETAINED_LABELS = {"nothing": "nothing", "weights": "weights", "everything": "weights and checkpoints"}
"""checkpoint.keep -> text of the files that stay."""


@dataclass(frozen=True)
class DiskUsage:
    """Disk space of a launch, in bytes. Cells may differ, so the amounts per cell are the smallest and the largest."""

    cells: int
    """Number of cells to train."""
    per_cell: tuple[int, int]
    """Smallest and largest amount that stays of a finished cell."""
    retained: int
    """Amount that stays of all cells."""
    running: int
    """Largest amount of a running cell: two checkpoints, and a third while it is written."""
    free: int | None
    """Free space of the storage; None if it is not on a disk of this machine."""
    storage_root: str
    """Folder or URL of the storage, as messages name it."""
    keep: tuple[str, ...]
    """Values of checkpoint.keep among the cells."""

    @property
    def is_short(self) -> bool:
        """True if the retained files and one running cell exceed the free space; False if unknown or without cells."""
        return self.cells > 0 and self.free is not None and self.retained + self.running > self.free

    def describe(self) -> list[str]:
        """Return one line on the disk space, and a warning as a second one if it does not suffice.

        Empty without cells.
        """
        if not self.cells:
            return []
        least, most = (format_bytes(value) for value in self.per_cell)
        parts = " or ".join(RETAINED_LABELS[word] for word in self.keep)
        number, unit = least.split()
        each = most if least == most else f"{number} to {most}" if most.endswith(f" {unit}") else f"{least} to {most}"
        stays = (
            f"{each} of {parts} per cell, {format_bytes(self.retained)} for {counted(self.cells, 'cell')}"
            if self.retained
            else "nothing is kept"
        )
        free = (
            f"{format_bytes(self.free)} free in {self.storage_root}"
            if self.free is not None
            else f"in {self.storage_root}"
        )
        lines = [
            f"disk: {stays} (checkpoint.keep: {', '.join(self.keep)}); "
            f"during training up to {format_bytes(self.running)} per running cell; {free}"
        ]
        if self.is_short and self.free is not None:
            lines.append(
                f"warning: {format_bytes(self.retained)} to keep and {format_bytes(self.running)} during training exceed the "
                f"{format_bytes(self.free)} free in {self.storage_root}; free disk space, set checkpoint.keep: nothing, or set "
                "checkpoint.path to another location"
            )
        return lines

    def as_json(self) -> dict[str, int | None]:
        """Return the amounts in bytes under the keys of `launch --dry-run --json`.

        The keys are disk_bytes_per_cell (of the largest cell), disk_bytes_kept (all cells together), disk_bytes_running
        (largest running cell) and disk_bytes_free (None if unknown).
        """
        return {
            "disk_bytes_per_cell": self.per_cell[1],
            "disk_bytes_kept": self.retained,
            "disk_bytes_running": self.running,
            "disk_bytes_free": self.free,
        }


def disk_needed(cells: Sequence[Cell], runs: Path) -> DiskUsage:
    """Return the disk usage of training these cells; without cells, nothing is needed.

    Weights and optimizer states are counted, without names and headers (about 400 bytes per tensor). What stays of a
    cell follows from `checkpoint.keep`: nothing, weights, or with "everything" the weights and the newest KEEP_NEWEST
    (2) checkpoints. While running, a cell takes one checkpoint more. Imports torch.

    Args:
        cells: Cells to train; the storage is that of the first one's checkpoint.path alone.
        runs: Folder of the runs, the default storage.

    Raises:
        StorageAddressError: For a checkpoint.path that is not valid.
        StorageError: For a storage that cannot be used.
    """
    # imports torch, which other commands need not load
    from ..checkpoints.checkpoint import state_bytes

    counted: dict[tuple[int, bool, str, str], tuple[int, int]] = {}
    each, running = [], 0
    for cell in cells:
        config = cell.config
        is_16_bit = config.train.activations_on(cuda=config.resources.gpus > 0) == "bfloat16"
        key = (
            id(config.model),
            is_16_bit,
            config.train.optimizer,
            config.train.muon_for,
        )  # the id stays unique, since the cells keep the section alive
        if key not in counted:
            counted[key] = state_bytes(config.model, narrow=is_16_bit, optimizer=key[2], muon_for=key[3])
        weights, optimizers = counted[key]
        checkpoint_bytes = weights + optimizers
        stays = {"nothing": 0, "weights": weights, "everything": weights + file_names.KEEP_NEWEST * checkpoint_bytes}
        each.append(stays[config.checkpoint.keep])
        running = max(running, (file_names.KEEP_NEWEST + 1) * checkpoint_bytes)
    storage_root = storage.resolve(
        runs, storage.attempt_address(cells[0].config.checkpoint.path, "") if cells else ""
    ).rstrip("/")
    return DiskUsage(
        cells=len(cells),
        per_cell=(min(each, default=0), max(each, default=0)),
        retained=sum(each),
        running=running,
        free=storage.free_bytes(storage_root),
        storage_root=storage_root,
        keep=tuple(sorted({cell.config.checkpoint.keep for cell in cells})),
    )


def check_placement(cells: Sequence[Cell], *machines: Machine, held: Sequence[Gpu] = ()) -> None:
    """Raise MachineError if a cell fits on none of the machines, even when these are empty.

    Args:
        cells: The cells.
        machines: Machines that may run them, at least one.
        held: GPUs that another sweep uses, for the error message alone.

    Raises:
        MachineError: With the resources of the first such cell, the number of further ones, and the machines'
            resources.
        SweepError: For an fp8 cell and any GPU of the machines that it may get and that lacks fp8; checked first.
    """
    _check_precisions(cells, [gpu for machine in machines for gpu in machine.gpus])
    allocators = [MachineAllocator(machine) for machine in machines]
    never = [cell for cell in cells if all(room.find_allocation(cell.config.resources) is None for room in allocators)]
    if not never:
        return
    more = f" (and {counted(len(never) - 1, 'more cell')})" if len(never) > 1 else ""
    busy = f"; in use by another sweep: {', '.join(gpu.name for gpu in held)}" if held else ""
    have = (
        f"this machine has {machines[0]}" if len(machines) == 1 else f"the nodes have {'; '.join(map(str, machines))}"
    )
    raise MachineError(
        f"cell {never[0].slug}{more} needs {format_resources(never[0].config.resources)}, and {have}{busy}; "
        "change resources in the grid, or use a larger machine"
    )


def _check_precisions(cells: Sequence[Cell], gpus: Sequence[Gpu]) -> None:
    """Raise SweepError if an fp8 cell may get a GPU without fp8: any GPU of its gpu_type, or any at all without one.

    GPUs of unknown compute capability pass, and so do CPU cells. bf16 runs on every GPU, though slower below compute
    capability 8.0.
    """
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
