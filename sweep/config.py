"""Frozen config of one cell, section by section. Importing it loads torch only for a mixer's own settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ..model import registry
from ..model.bounds import (
    MAX_COUNT,
    MAX_CPUS,
    MAX_FLOAT,
    MAX_GIB,
    MAX_INT64,
    MAX_ITERATIONS,
    MAX_LENGTH,
    MAX_MINUTES,
    MAX_TOKENS,
    MAX_VALUES,
    MAX_WIDTH,
)
from ..model.config import Config, Flag, Float, Int, ModelConfig, knob, parse_flag
from ..results.console.text import counted


def knob_outside_id(default: Any, doc: str, *, identity: Any = ..., **limits: Any) -> Any:
    """Return a pydantic field that is not part of a cell's id.

    Such a field is a name, a path, or anything that cannot change trained weights.

    Args:
        default: Default value.
        doc: Description of the field.
        identity: Only for fields newer than existing databases: value that older configs implicitly have. Since no id
            holds the field, this may be any value that is right for them, also if the default changes later.
        **limits: Constraints of `pydantic.Field`, such as `ge` and `le`.
    """
    extra = {"outside": True} | ({} if identity is ... else {"identity": identity})
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def _compile_setting(value: Any) -> Any:
    """Return a switch as a bool, or the word "blocks"; texts such as on and off are switches too.

    Raises ValueError for anything else.
    """
    value = parse_flag(value)
    if not isinstance(value, bool) and value != "blocks":
        raise ValueError(f"must be on, off or blocks, got {value!r}")
    return value


class DataConfig(Config):
    """Source of the text. The fingerprint enters the cell id; names and paths do not."""

    corpus: str = knob_outside_id(
        "stdlib",
        "Name of the corpus: stdlib; files or shards under `path`; fineweb-edu, fineweb-edu-shards, finepdfs or "
        "wikitext-103 from the Hugging Face hub; hub, any dataset there (data.settings.hub); flipflop, mqar or mad; or one prepared on this machine with `data prepare --name`.",
    )
    corpus_source: str | None = knob(None, "SHA-256 of the plugin file that defines the corpus.", identity=None)
    path: str | None = knob_outside_id(
        None,
        "Folder or file of the text or shards, or a local copy of a hub corpus; relative paths start at the grid file.",
    )
    column: str = knob_outside_id(
        "text",
        "Field of JSON lines, or column of Parquet files and of the corpus hub, that holds the text.",
        identity="text",
    )
    tokenizer: str = knob_outside_id(
        "bytes",
        "bytes, gpt2 or json; its vocabulary must fit into model.vocab_size. Leave it out for a corpus prepared under a name, which brings its tokenizer.",
    )
    tokenizer_file: str | None = knob_outside_id(
        None,
        "For json, the file of the tokenizers library; for gpt2, its ranks (.tiktoken, or vocab.bpe next to encoder.json).",
    )
    end_of_text: str | None = knob_outside_id(
        None, "For json, the end-of-text token if it has an unusual name (usual: <|endoftext|>, </s>, ...)."
    )
    train_tokens: Int | None = knob_outside_id(
        None, "Training tokens to prepare; null: all available.", ge=1, le=MAX_TOKENS
    )
    validation_tokens: Int | None = knob_outside_id(
        None,
        "Tokens of the validation split, for text without splits of its own; null: 5% of the tokens, at most 2,097,153.",
        identity=None,
        ge=1,
        le=MAX_TOKENS,
    )
    heldout_documents: Int | None = knob_outside_id(
        None,
        "Maximum number of held-out long documents; null: 16 and at most a quarter of the text, or 64 from another corpus.",
        identity=None,
        ge=0,
        le=MAX_COUNT,
    )
    heldout: str | None = knob_outside_id(
        None, "Corpus, folder or file that supplies the long documents of the probes; null: the corpus itself."
    )
    heldout_tokens: Int = knob_outside_id(
        65_601, "Minimum tokens of a document to be held out for the length probes.", ge=2, le=MAX_LENGTH
    )
    fingerprint: str | None = knob(None, "SHA-256 of the tokenized splits, computed when the corpus is prepared.")
    shuffle: Flag = knob(
        True, "Read the rows in a random order that depends on the seed; off: in file order.", identity=True
    )
    whole_steps: Flag = knob(
        False,
        "Use only complete optimizer steps of each shard and skip its remainder, as in the published runs.",
        identity=False,
    )
    settings: dict[str, dict[str, Any]] = knob_outside_id(
        {}, "Settings by corpus name; they determine the fingerprint.", identity={}
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


HUB_PREFIX = "hf:"
"""Prefix that distinguishes an external model from the name of a cell."""
MUON_FIELDS = ("muon_for", "muon_lr", "muon_momentum", "muon_weight_decay", "muon_iterations", "muon_split")
"""Settings of Muon, without effect under `optimizer: adamw`."""


def uses_muon(shape: Sequence[int], optimizer: str, muon_for: str) -> bool:
    """Return True if Muon updates a matrix inside a block, False if AdamW does.

    Args:
        shape: shape of the parameter; its last two axes are a matrix.
        optimizer: `train.optimizer`.
        muon_for: `train.muon_for`: "matrices", or "square" for those with as many rows as columns.
    """
    return optimizer == "muon" and (muon_for == "matrices" or shape[-2] == shape[-1])


class TrainConfig(Config):
    """Training recipe (docs/reference/mechanisms.md, "Training")."""

    tokens: Int = knob(
        996_147_200,
        "Training tokens; steps = floor(tokens / batch_tokens). 0: no step, for initial weights that are only evaluated.",
        ge=0,
        le=MAX_TOKENS,
    )
    seq_len: Int = knob(2048, "Tokens per row.", ge=2, le=MAX_LENGTH)
    batch_tokens: Int = knob(
        524_288, "Tokens per optimizer step; a multiple of seq_len * micro_batch.", ge=2, le=MAX_LENGTH
    )
    micro_batch: Int = knob(
        4, "Rows per forward pass; part of the cell id because regularizers depend on it.", ge=1, le=MAX_COUNT
    )
    loss_reduction: Literal["mean", "sum"] = knob(
        "mean",
        "Reduction of the cross-entropy per token: mean, or sum over the micro-batch (the published runs).",
        identity="mean",
    )
    loss_on: Literal["all", "marked"] = knob(
        "all",
        "Targets of the training and validation loss: all, or only those that the corpus marks.",
        identity="all",
    )
    warmup_steps: Int = knob(
        0,
        "Steps of linear warm-up of the learning rate.",
        identity=0,
        ge=0,
        le=MAX_TOKENS,
    )
    schedule: Literal["cosine", "linear", "wsd"] = knob(
        "cosine",
        "Decay of the learning rate to 0 after the constant part: half a cosine, linear, or wsd (1 - sqrt).",
        identity="cosine",
    )
    constant: Float = knob(
        0.3, "Fraction of the steps after the warm-up that run at the full learning rate.", identity=0.3, ge=0, le=1
    )
    clip: Float = knob(1.0, "Maximum global gradient norm.", identity=1.0, gt=0, le=MAX_FLOAT)
    optimizer: Literal["muon", "adamw"] = knob(
        "muon", "Optimizer of the matrices inside blocks; all other parameters use AdamW.", identity="muon"
    )
    muon_for: Literal["matrices", "square"] = knob(
        "matrices",
        "Matrices inside blocks that Muon updates: all, or those with as many rows as columns, with AdamW for the others.",
        identity="matrices",
    )
    matrix_lr: Float = knob(
        3e-4,
        "AdamW learning rate of the matrices inside blocks that Muon does not update.",
        identity=3e-4,
        ge=0,
        le=MAX_FLOAT,
    )
    muon_lr: Float = knob(0.02, "Learning rate of Muon.", identity=0.02, ge=0, le=MAX_FLOAT)
    muon_momentum: Float = knob(0.95, "Nesterov momentum of Muon.", identity=0.95, ge=0, lt=1)
    muon_weight_decay: Float = knob(0.01, "Decoupled weight decay of Muon.", identity=0.01, ge=0, le=MAX_FLOAT)
    muon_iterations: Int = knob(12, "Newton-Schulz iterations of Muon.", identity=12, ge=1, le=MAX_ITERATIONS)
    muon_split: Literal["none", "head"] = knob(
        "none",
        "Matrices that Muon orthogonalizes: each as a whole (none), or the query, gate, key, value and output projections of attention cut by head, "
        "each head's block on its own (head, also called MuonSplit).",
        identity="none",
    )
    embedding_lr: Float = knob(0.3, "AdamW learning rate of the embedding.", identity=0.3, ge=0, le=MAX_FLOAT)
    head_lr: Float = knob(1 / 320, "AdamW learning rate of the head's weight.", identity=1 / 320, ge=0, le=MAX_FLOAT)
    scalar_lr: Float = knob(
        0.01, "AdamW learning rate of biases, norm weights and per-head scalars.", identity=0.01, ge=0, le=MAX_FLOAT
    )
    adam_beta1: Float = knob(0.8, "First AdamW beta.", identity=0.8, ge=0, lt=1)
    adam_beta2: Float = knob(0.95, "Second AdamW beta.", identity=0.95, ge=0, lt=1)
    adam_eps: Float = knob(1e-10, "AdamW epsilon.", identity=1e-10, gt=0, le=MAX_FLOAT)
    adam_weight_decay: Float = knob(
        0.0,
        "Decoupled weight decay of all AdamW parameters, including biases and norms.",
        identity=0.0,
        ge=0,
        le=MAX_FLOAT,
    )
    regularizer: str = knob(
        "baseline", "Representation regularizer on every block's output; baseline: none.", identity="baseline"
    )
    regularizer_source: str | None = knob(
        None, "SHA-256 of the plugin file that defines the regularizer.", identity=None
    )
    regularizer_weight: Float = knob(
        0.01, "Weight alpha of the regularizer: loss = (1 - alpha) CE + alpha reg.", identity=0.01, ge=0, le=1
    )
    regularizer_sketch: Int = knob(
        64, "Number of random directions of the regularizer.", identity=64, ge=1, le=MAX_WIDTH
    )
    distractor: Flag = knob(False, "Add the distractor loss of the global layers.", identity=False)
    distractor_weight: Float = knob(
        0.01,
        "Weight of the distractor loss (train.distractor), which is added to the regularized loss.",
        identity=0.01,
        ge=0,
        le=MAX_FLOAT,
    )
    distractor_count: Int | None = knob(
        None,
        "Random vectors per row that the distractor loss turns into extra keys; null: seq_len.",
        identity=None,
        ge=0,
        le=MAX_LENGTH,
    )
    deterministic: Flag = knob(
        False, "Use only bit-reproducible operations; slower on CUDA. The CPU is always reproducible.", identity=False
    )
    compile: Annotated[Flag | Literal["blocks"], BeforeValidator(_compile_setting)] = knob(
        True,
        "Compile the network on CUDA (true), or not (false); changes only rounding and speed. blocks: one graph per kind of block, which compiles "
        "faster and fuses less, for networks that take minutes to compile.",
        identity=True,
    )
    graphs: Literal["auto", "on", "off"] = knob_outside_id(
        "auto",
        "Replay steps as CUDA graphs: on, off, or auto (if launching a micro-batch may take longer than computing it). With train.deterministic, results are bit-identical.",
        identity="auto",
    )
    recompute: Literal["none", "block", "selective"] = knob_outside_id(
        "none",
        "Activations that are computed again in the backward pass instead of stored, to save GPU memory: none, those of every block, or of every second "
        "block (selective). Gradients are the same bits; the compiler then works block by block, which changes only rounding.",
        identity="none",
    )
    kernels: Literal["auto", "torch"] = knob(
        "auto",
        "auto: the best kernels for the machine; torch: only torch's own operations, for comparison.",
        identity="auto",
    )

    activations: Literal["auto", "bfloat16", "float32"] = knob(
        "auto",
        "Data type of activations; auto: bfloat16 on CUDA, float32 on the CPU (where bfloat16 is slow).",
        identity="auto",
    )

    precision: Literal["bf16", "fp16", "fp8"] = knob(
        "bf16",
        "Precision of a step on CUDA: bf16; fp16 with loss scaling, for GPUs without bf16; fp8 for the projections and "
        "bf16 for the rest (Ada, Hopper and later). The CPU allows only bf16 and computes in float32.",
        identity="bf16",
    )

    init_from: str | None = knob_outside_id(
        None,
        "Source of the initial weights: a trained cell of the database (id, name or SWEEP:NAME); hf:FOLDER or hf:OWNER/NAME, a model of "
        "Hugging Face shaped like Llama or Qwen, or an exported cell; or the file or folder of a checkpoint; null: random weights.",
        identity=None,
    )
    init_sha256: str | None = knob(
        None, "SHA-256 of the initial weights, computed when the cell is planned.", identity=None
    )
    init_missing: Literal["error", "init"] = knob_outside_id(
        "error",
        "Action for tensors that the initial weights lack or have in excess, and for settings of the network (the mixer's "
        "apart) that differ from the source's: an error that names them, or init: new tensors get random values and are listed.",
        identity="error",
    )

    def activations_on(self, *, cuda: bool) -> Literal["bfloat16", "float16", "float32"]:
        """Return the name of the activations' dtype on CUDA or on the CPU.

        `activations` decides unless it is auto. Otherwise it is float32 on the CPU, float16 on CUDA with precision
        fp16, and bfloat16 on CUDA with any other precision.
        """
        if self.activations != "auto":
            return self.activations
        if not cuda:
            return "float32"
        return "float16" if self.precision == "fp16" else "bfloat16"

    @model_validator(mode="after")
    def _precision_sets_activations(self) -> TrainConfig:
        """Raise ValueError for an activation type together with a precision that already determines it."""
        if self.precision != "bf16" and self.activations != "auto":
            raise ValueError(
                f"precision ({self.precision}) already determines the activation type, but activations is {self.activations}; "
                "set activations to auto"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        """Raise ValueError for a batch that micro-batches do not divide, and for a training that is too short.

        There must be at least one step, and at least one after the warm-up; none is enough with initial weights.
        """
        rows = self.seq_len * self.micro_batch
        if self.batch_tokens % rows:
            raise ValueError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of seq_len * micro_batch ({self.seq_len} * {self.micro_batch} = {rows})"
            )
        if self.tokens == 0 and self.init_from is not None:
            return self
        if self.tokens < self.batch_tokens:
            raise ValueError(f"tokens ({self.tokens}) is less than one step of batch_tokens ({self.batch_tokens})")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below the {self.steps} steps of the run")
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps: floor(tokens / batch_tokens)."""
        return self.tokens // self.batch_tokens

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step."""
        return self.batch_tokens // (self.seq_len * self.micro_batch)

    def ranks_problem(self, setting: str, size: int) -> str | None:
        """Return why `size` GPUs or ranks cannot divide the micro-batches of a step, and the remedy; None if they can.

        Args:
            setting: Name of the setting or option that holds the size.
            size: Number of GPUs or ranks.
        """
        if size <= self.accumulation:
            return None
        return (
            f"{setting} is {size}, but a step of train.batch_tokens ({self.batch_tokens}) has only "
            f"{counted(self.accumulation, 'micro-batch', 'micro-batches')} of train.seq_len * train.micro_batch "
            f"({self.seq_len} * {self.micro_batch}) tokens to divide; set {setting} to {self.accumulation} or less"
        )


MOVED_PROBE_SETTINGS = {
    "junk_rows": ("junk", "rows"),
    "needle_trials": ("needle", "trials"),
    "needle_digits": ("needle", "digits"),
    "needle_seed": ("needle", "seed"),
}
"""Former field of the eval section -> (probe, field) that replaced it.

Older grids use the former names, and databases and job files keep them so that older code can read them. No entry is
ever added.
"""


class SamplesConfig(Config):
    """Texts that the network writes at every validation to continue given prompts; disabled without prompts."""

    prompts: tuple[str, ...] = knob(
        (), 'Prompts to continue; "" starts an empty text. Without prompts, nothing is generated.'
    )
    tokens: Int = knob(64, "Maximum tokens per text; an end-of-text token stops it earlier.", ge=1, le=MAX_LENGTH)
    temperature: Float = knob(0.8, "Sampling temperature; 0: always the most likely token.", ge=0, le=MAX_FLOAT)
    top_p: Float = knob(
        1.0, "Nucleus sampling: draw from the smallest set of tokens with this total probability.", gt=0, le=1
    )


class EvalConfig(Config):
    """Measurements. Not part of the cell id: changing them never retrains a cell."""

    probes: tuple[str, ...] = knob(("val", "clean", "junk", "needle"), "Probes to run, by name.")
    lengths: tuple[Annotated[Int, Field(le=MAX_LENGTH)], ...] = knob(
        (2048, 4096, 8192, 16384, 32768, 65536), "Context lengths in tokens, in ascending order.", max_length=MAX_VALUES
    )
    validate_every: Int = knob(125, "Optimizer steps between points of the validation curve.", ge=1, le=MAX_TOKENS)
    validation_tokens: Int = knob(
        2_097_152, "Tokens of the validation loss, from the start of the validation split.", ge=2, le=MAX_TOKENS
    )
    documents: Int = knob(16, "Number of held-out documents for the probes that read documents.", ge=1, le=MAX_COUNT)
    texts: tuple[str, ...] = knob(
        (),
        "Further long texts, each a file or folder, on which clean, position_nll and needle are measured too. A text has the name of its file up to "
        "the first dot: texts/code.jsonl.xz gives the probes clean:code, position_nll:code and needle:code.",
    )
    window: Literal["full", "trained"] = knob(
        "full",
        "Attention of probes in cells that train with a window: without the window (full), or with it (trained).",
    )
    settings: dict[str, dict[str, Any]] = knob({}, "Settings by probe name.")
    samples: SamplesConfig = knob(
        SamplesConfig(),
        "Texts that the network writes at every validation: prompts to continue, their length, and sampling.",
    )
    chunk_tokens: Int = knob(
        8192,
        "Tokens that an evaluation processes at once; limits memory, and changes results only by rounding.",
        ge=1,
        le=MAX_LENGTH,
    )

    @model_validator(mode="before")
    @classmethod
    def _move_former_names(cls, values: Any) -> Any:
        """Return the values with former fields moved into `settings`; the input is not changed.

        Raises ValueError if both forms are given with different values. Malformed `settings` are returned unchanged,
        for pydantic to report.
        """
        if not isinstance(values, Mapping) or values.keys().isdisjoint(MOVED_PROBE_SETTINGS):
            return values
        current = {name: value for name, value in values.items() if name not in MOVED_PROBE_SETTINGS}
        own = current.get("settings", {})
        if not isinstance(own, Mapping) or not all(isinstance(fields, Mapping) for fields in own.values()):
            return values  # pydantic reports the error
        settings = {probe: dict(fields) for probe, fields in own.items()}
        for name in values.keys() & MOVED_PROBE_SETTINGS:
            probe, field = MOVED_PROBE_SETTINGS[name]
            if settings.setdefault(probe, {}).setdefault(field, values[name]) != values[name]:
                raise ValueError(
                    f"{name} and settings.{probe}.{field} are the same setting with different values; keep one of them"
                )
        return {**current, "settings": settings}

    @model_serializer(mode="wrap")
    def _dump_with_former_names(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the section's fields for a dump, with settings of MOVED_PROBE_SETTINGS under their former names.

        Older code can read that. Default `samples`, `texts` and `window`, and empty `settings` are left out.
        """
        dumped: dict[str, Any] = dump(self)
        settings = {probe: dict(own) for probe, own in dumped.pop("settings").items()}
        for name, (probe, field) in MOVED_PROBE_SETTINGS.items():
            if field in settings.get(probe, {}):
                dumped[name] = settings[probe].pop(field)
        settings = {probe: own for probe, own in settings.items() if own}
        if self.samples == SamplesConfig():
            del dumped["samples"]
        for name in ("texts", "window"):
            if getattr(self, name) == EvalConfig.model_fields[name].default:
                del dumped[name]
        return {**dumped, "settings": settings} if settings else dumped

    @model_validator(mode="after")
    def _lengths_rise(self) -> EvalConfig:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 2:
            raise ValueError(f"lengths must rise and start at 2 or more, got {list(self.lengths)}")
        return self

    @property
    def text_paths(self) -> dict[str, str]:
        """Name -> path of the further texts; the name is that of the file or folder up to the first dot."""
        return {PurePath(path).name.lower().partition(".")[0]: path for path in self.texts}

    @model_validator(mode="after")
    def _texts_have_names(self) -> EvalConfig:
        """Raise ValueError for two texts of one name, and for a name with other characters than a-z, 0-9, _ and -."""
        if len(self.text_paths) < len(self.texts):
            raise ValueError(f"texts must have different names, got {list(self.texts)}; rename a file")
        for name, path in self.text_paths.items():
            if not re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
                raise ValueError(f"texts: the name of {path} must consist of letters, digits, _ and -; rename it")
        return self


MIN_GPUS, MAX_GPUS = 0.01, 64
"""Limits on the GPUs of an attempt that uses any; below 1 is a share of one GPU, above it a number of entire GPUs."""
MAX_RANKS = 64
"""Limit on the processes of one attempt."""


class Resources(Config):
    """Resources of one attempt. Not part of the cell id."""

    gpus: Float = knob(
        0,
        "GPUs per attempt: 0 runs on the CPU and hides all GPUs; 1 reserves a whole GPU and requires CUDA; 0.5 shares one; "
        "an integer from 2 trains the cell on that many GPUs of one machine.",
        ge=0,
        le=MAX_GPUS,
    )
    ranks: Int = knob(
        1,
        "Processes that train one cell together without GPUs, for tests; with GPUs, their number.",
        ge=1,
        le=MAX_RANKS,
    )
    gpu_type: str | None = knob(None, "Word that the GPU's name must contain, such as H200; null: any GPU.")
    cpus: Int = knob(1, "CPU cores and torch threads per attempt.", ge=1, le=MAX_CPUS)
    memory_gb: Float | None = knob(None, "Memory in GiB reserved per attempt; null: no reservation.", gt=0, le=MAX_GIB)
    on_cuda_oom: Literal["fail", "halve"] = knob(
        "fail",
        "Action when training runs out of GPU memory: fail, or retry once with half the micro-batch and record it (halve).",
    )
    order: Literal["longest", "pairs", "contrasts", "grid"] = knob(
        "longest",
        "Order of cells: longest first (longest); matched pairs early, so that a partial sweep is usable (pairs); pairs of declared contrasts early (contrasts); or as listed (grid).",
    )
    hang_minutes: Float = knob(
        30.0, "Minutes without any progress after which an attempt is killed and retried.", gt=0, le=MAX_MINUTES
    )

    @model_validator(mode="after")
    def _gpu_fields_agree(self) -> Resources:
        """Raise ValueError for numbers of GPUs that are not possible, and for settings that need or exclude a GPU.

        Refused are a share below the minimum, more than one GPU that is no integer, `ranks` beside GPUs, and a GPU type
        without a GPU.
        """
        if 0 < self.gpus < MIN_GPUS or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise ValueError(f"gpus ({self.gpus:g}) must be 0, a share of one GPU from {MIN_GPUS} to 1, or an integer")
        if self.ranks > 1 and self.gpus:
            raise ValueError(f"ranks ({self.ranks}) is for cells without GPUs; set gpus to the number of GPUs alone")
        if self.gpu_type is not None and not self.gpus:
            raise ValueError(f"gpu_type ({self.gpu_type}) needs a GPU, but gpus is 0; set gpus to 1")
        return self

    @property
    def n_ranks(self) -> int:
        """Processes that train one cell together: the number of GPUs, or `ranks` without any; 1 for a share of a GPU."""
        return max(self.ranks, int(self.gpus))


class CheckpointConfig(Config):
    """Checkpoints of a running attempt: interval, and files to keep. Not part of the cell id."""

    every_minutes: Float = knob(10.0, "Minutes between checkpoints.", gt=0, le=MAX_MINUTES)
    every_steps: Int | None = knob(
        None, "Optimizer steps between checkpoints, in addition to every_minutes.", ge=1, le=MAX_TOKENS
    )
    keep: Literal["nothing", "weights", "everything"] = knob("weights", "Files to keep on disk when the cell is done.")
    path: str | None = knob(
        None, "Folder or fsspec URL (s3://bucket/...) for checkpoints and kept weights; null: the attempt's own folder."
    )


class Plugin(Config):
    """A Python file outside the package that registers mixers, memories, position schemes, regularizers, corpora or probes."""

    path: str = knob(..., "Absolute path of the file, or package:NAME==VERSION:GROUP.PART of an installed package.")
    sha256: str = knob(..., "SHA-256 of the file, or of the package's Python files, when the grid was read.")


class CellConfig(Config):
    """Complete config of one cell. `model`, `data`, `train` and `seed` determine its id."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    seed: Int = knob(0, "Seed of the replicate; every random draw depends on it.", ge=0, le=MAX_INT64)
    eval: EvalConfig = EvalConfig()
    resources: Resources = Resources()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plugins: tuple[Plugin, ...] = ()


def without_identity_defaults(config: CellConfig) -> dict[str, Any]:
    """Return the config as JSON values without fields at their identity default, so that older code can read it.

    A field of model, data, train or a part's settings is left out only if its value, its current default and its
    identity default are equal. Other sections are complete.
    """
    dumped = config.model_dump(mode="json")
    for section, cls in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig)):
        dumped[section] = _drop_identity_defaults(cls, dumped[section])
    for section, table in registry.SETTINGS.items():
        parts = dumped["model"].get(section, {})
        if parts:
            stored = {name: _drop_identity_defaults(table.load(name).Config, part) for name, part in parts.items()}
            dumped["model"] |= {section: stored}
    return dumped


def _drop_identity_defaults(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without fields whose value, default and identity default are all equal."""
    stored = dict(values)
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if "identity" in extra and extra["identity"] == values[name] == field.default:
            del stored[name]
    return stored


SECTIONS = ("model", "data", "train", "eval", "resources", "checkpoint")
"""Sections of a cell's config; the seed and the plugins are separate fields."""
