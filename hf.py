"""Cells as Hugging Face models: what `atma-sweep export CELL --to hf FOLDER` writes is loaded through these classes.

    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)

The folder's modeling file subclasses them, so that `save_pretrained` copies a file of a few lines and no network code.
Letters of shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file

from .model.backbone import Backbone
from .model.config import ModelConfig
from .model.inference.decode import PagedDecoder
from .model.resolve import longest_text
from .sweep.errors import SweepError
from .sweep.external_models.hub_checkpoint import EXPORT_AGAIN, InvalidCheckpoint, check_export, check_loaded_tensors
from .sweep.grid.plugins import load_plugin

MODEL_TYPE = "atma-sweep"


class CellModelConfig(PretrainedConfig):
    """Config of an exported cell: its network, and how it reads its window.

    `network` is the section `model` of the cell's config. `full_context` ignores the window that the network was trained
    with, as the probes do. `plugins` are names of the Python files beside config.json that define parts of the network.
    `corpus_tokenizer` is the name of the tokenizer of its text. `weights_sha256` is the hash of the exported weights.
    """

    model_type = MODEL_TYPE

    network: dict[str, Any] | None = None
    full_context: bool = False
    plugins: list[str] | None = None
    corpus_tokenizer: str | None = None
    weights_sha256: str | None = None
    vocab_size: int = 0
    tie_word_embeddings: bool = False  # a shared matrix is one tensor of the network

    def __post_init__(self, **extra: Any) -> None:
        """Derive the sizes that other programs ask for."""
        self.network, self.plugins = dict(self.network or {}), list(self.plugins or ())
        self.vocab_size = self.network.get("vocab_size", self.vocab_size)
        self.hidden_size = self.network.get("d_model", 0)
        self.num_hidden_layers = self.network.get("n_layers", 0)
        self.num_attention_heads = self.network.get("n_heads", 0)
        super().__post_init__(**extra)


class DecodingCache:
    """Cache of `generate`: pages of keys and values, and recurrent states, of each sequence of the batch."""

    is_compileable = False

    def __init__(self, network: Backbone, texts: int, tokens: int, *, full_context: bool) -> None:
        """Allocate a cache for `texts` sequences of at most `tokens` tokens; reordering beams needs room for twice as many.

        Raises:
            ValueError: A part of the network cannot decode token by token.
        """
        self.decoder = PagedDecoder(network, texts=2 * texts, tokens=tokens, full_context=full_context)
        self.slots: list[int] = []
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the cache has seen, padding included."""
        return self.length

    def begin(self, texts: list[Tensor], length: int) -> Tensor:
        """Read the prompts, int64 [T] each and without padding; return the logits [B, V] after them.

        `length` is the number of tokens of the padded batch.
        """
        started = [self.decoder.begin(text) for text in texts]
        self.slots, self.length = [slot for slot, _ in started], length
        return torch.stack([logits for _, logits in started])

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each sequence; return the logits [B, V] after it."""
        self.length += 1
        return self.decoder.step(self.slots, tokens_B)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i a copy of sequence `beam_idx[i]`, as beam search asks for."""
        old = self.slots
        self.slots = [self.decoder.fork(old[index]) for index in beam_idx.tolist()]
        for slot in old:
            self.decoder.close(slot)


class CellForCausalLM(PreTrainedModel, GenerationMixin):
    """Network of an exported cell, with the interface of Hugging Face's causal language models."""

    config_class = CellModelConfig
    base_model_prefix = "network"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False

    def __init__(self, config: CellModelConfig) -> None:
        """Build the network on the CPU.

        Weights are float32. Activations have the config's `dtype`, float32 if it has none.

        Raises:
            ModelConfigError: The installed version of atma-sweep has no such part.
            SweepError: A plugin of the folder is missing or cannot be loaded.
        """
        super().__init__(config)
        self.plugin_files = [_load_plugin(str(config.name_or_path), name) for name in config.plugins or ()]
        # some mixers need real numbers in their constructors, and transformers builds models on the meta device
        with torch.device("cpu"):
            self.network = Backbone(
                ModelConfig.model_validate(config.network), dtype=getattr(config, "dtype", None) or torch.float32
            )
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, dtype: Any = None, **options: Any
    ) -> CellForCausalLM:  # fmt: skip
        """Load a model; weights stay float32, and `dtype` is the type of the activations, as in training.

        Args and errors as for `PreTrainedModel.from_pretrained`. `dtype` "auto" or None is float32.

        Raises:
            OSError: The folder is half an export: weights are missing, incomplete or changed.
        """
        dtype = options.pop("torch_dtype", dtype)
        with_info = options.pop("output_loading_info", False)
        source = pretrained_model_name_or_path
        folder = Path(str(source), options.get("subfolder") or "")
        try:
            if folder.is_dir() and options.get("state_dict") is None:
                check_export(folder)
            loaded: Any = super().from_pretrained(
                source, *arguments, dtype=torch.float32, output_loading_info=True,
                **{"ignore_mismatched_sizes": True} | options,
            )  # fmt: skip
            model, info = loaded
            accepted = {"mismatched_keys": ()} if options.get("ignore_mismatched_sizes") else {}
            check_loaded_tensors(source, info | accepted, EXPORT_AGAIN)
        except SafetensorError as error:
            raise OSError(f"{source} cannot be loaded: {error}; {EXPORT_AGAIN}") from None
        except InvalidCheckpoint as error:
            raise OSError(str(error)) from None
        wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if wanted not in (None, torch.float32):
            network = Backbone(model.network.config, dtype=wanted)
            network.load_state_dict(model.network.state_dict())
            model.network, model.config.dtype = network.to(model.network.device).eval(), wanted
        return loaded if with_info else model

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """Save config, weights and modeling file as `PreTrainedModel.save_pretrained` does, and the plugin files."""
        self.config.weights_sha256 = None  # the weights may have changed since the export
        super().save_pretrained(save_directory, *arguments, **options)
        for path in self.plugin_files:
            if path.parent != Path(save_directory).resolve():
                shutil.copy(path, save_directory)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a network that was not loaded, as a cell with seed 0."""
        if isinstance(module, Backbone) and not all(
            getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()
        ):
            module.init_weights(0)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.network.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.network.embedding = cast("nn.Embedding", value)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> bool:  # fmt: skip
        """Put an empty cache into `model_kwargs`, unless the caller wants none or the network cannot use one.

        Returns:
            True if there is a cache.
        """
        if generation_config.use_cache is False or self.network.no_step_reason() is not None:
            model_kwargs["use_cache"] = False
            return False
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        model_kwargs["past_key_values"] = DecodingCache(
            self.network, batch_size * copies, max_cache_length + 1, full_context=self.config.full_context
        )
        return True

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, past_key_values: DecodingCache | None = None, attention_mask: Tensor | None = None,
        use_cache: bool | None = None, **extra: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the arguments of the next `forward`: the whole batch, or the newest tokens once the cache has begun."""
        if past_key_values is not None and past_key_values.slots:
            input_ids, attention_mask = input_ids[:, -1:], None
        return {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: DecodingCache | None = None,
        labels: Tensor | None = None, logits_to_keep: int | Tensor = 0, return_dict: bool | None = None, **extra: Any,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:  # fmt: skip
        """Return the logits [B, T, V], float32, of int64 tokens [B, T].

        Padding, where `attention_mask` is 0, is left out of a sequence before the network reads it, because a recurrent
        memory would remember it; its logits are 0. With a cache only the logits [B, 1, V] after the last token are
        computed.

        Args:
            input_ids: Tokens.
            attention_mask: int [B, T], 1 for tokens; None: no padding.
            past_key_values: Cache of `generate`; None without one.
            labels: Targets [B, T], shifted here; -100 does not count. The loss is nats per token.
            logits_to_keep: Number of last positions, or their indices, whose logits are wanted; 0: all.
            return_dict: False returns a tuple.
            **extra: Arguments of other models, such as `position_ids`, which have no effect.

        Raises:
            ValueError: A sequence is longer than the network supports.
        """
        longest = longest_text(self.network.config)
        if longest is not None and input_ids.shape[1] > longest:
            raise ValueError(f"this network supports at most {longest} tokens, got {input_ids.shape[1]}")
        if past_key_values is not None:
            if past_key_values.slots:
                logits_BTV = past_key_values.step(input_ids[:, -1])[:, None]
            else:
                texts = [_without_padding(input_ids, attention_mask, row) for row in range(len(input_ids))]
                logits_BTV = past_key_values.begin(texts, input_ids.shape[1])[:, None]
        else:
            logits_BTV = self._logits(input_ids, attention_mask)
            if isinstance(logits_to_keep, Tensor) or logits_to_keep:
                positions = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
                logits_BTV = logits_BTV[:, positions]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size)
        if return_dict is False:
            return (logits_BTV,) if loss is None else (loss, logits_BTV)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past_key_values)  # type: ignore[arg-type]

    def _logits(self, tokens_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Return the logits [B, T, V]; 0 at padding."""
        if mask_BT is None or bool(mask_BT.all()):
            return self._logits_unpadded(tokens_BT)
        logits_BTV = self._logits_unpadded(tokens_BT[:1, :1]).new_zeros(*tokens_BT.shape, self.config.vocab_size)
        for row, mask_T in enumerate(mask_BT.bool()):
            if mask_T.any():
                text_T = _without_padding(tokens_BT, mask_BT, row)
                logits_BTV[row, mask_T] = self._logits_unpadded(text_T[None])[0]
        return logits_BTV

    def _logits_unpadded(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits [B, T, V] of sequences without padding."""
        hidden_BTD = self.network.features(tokens_BT, full_context=self.config.full_context).hidden_BTD
        return self.network.logits(hidden_BTD)


def _load_plugin(folder: str, name: str) -> Path:
    """Load a plugin file of a model's folder or repository, which runs its code, and return its path.

    The user has allowed it with `trust_remote_code=True`.

    Raises:
        SweepError: It is missing, or its import fails.
    """
    try:
        path = Path(str(cached_file(folder, name))).resolve()
        load_plugin(path)
    except Exception as error:
        raise SweepError(f"plugin {name} of {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    return path


def _without_padding(tokens_BT: Tensor, mask_BT: Tensor | None, row: int) -> Tensor:
    """Return a row's tokens [T] without padding; the row itself if all of it is padding."""
    if mask_BT is None or not mask_BT[row].any():
        return tokens_BT[row]
    return tokens_BT[row][mask_BT[row].bool()]
