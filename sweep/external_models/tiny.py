"""Tiny checkpoints with random weights in the Hugging Face format, of any family of the paper's table.

python -m atma_sweep.sweep.external_models.tiny FOLDER [FAMILY]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.byte_pairs import END, byte_pairs
from .hub_checkpoint import need_transformers

VOCABULARY = 320
TEXT = (
    "The model reads a long row of text and guesses what comes next from all that it has seen so far.",
    "The access code for the record stands at its beginning, and much later somebody asks for the code again.",
)
"""Training text of the tokenizer."""
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_SCAN: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **_LINEAR},
    "qwen3": {},
    "qwen2": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 64, **_SCAN,
    },
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16,
    },
    "granite": {"logits_scaling": 4.0},
    "falcon_h1": {"mamba_d_ssm": 64, **_SCAN},
    "llama": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
}  # fmt: skip
"""Settings of the small config by model type, in addition to the common ones. SmolLM2 is a llama."""


def make_tiny_checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Write a model with random weights and its tokenizer into `folder`, and return the folder.

    The global random state is left unchanged; progress bars of transformers are turned off. The tokenizer always has at
    most 320 tokens.

    Args:
        folder: Folder to write; created if absent.
        family: qwen3_5_text, qwen3, qwen2, granitemoehybrid, gemma3_text, granite, falcon_h1, llama or lfm2 (keys of
            FAMILIES).
        seed: Seed of the weights.
        vocabulary: Number of token ids of the model.

    Raises:
        KeyError: The family is unknown.
        MachineError: The package transformers is not installed.
    """
    need_transformers()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(
        family, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, pad_token_id=0, **_COMMON, **FAMILIES[family]
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, texts: Sequence[str] = TEXT, vocabulary: int = VOCABULARY) -> None:
    """Train a byte-level BPE tokenizer on `texts` and write it into `folder`; it encodes every text.

    `END` is both its first and its last token of a text, but is not added by itself.

    Args:
        folder: Folder to write; created if absent.
        texts: Training texts.
        vocabulary: Maximum number of tokens.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_pairs(texts, vocabulary)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)


def main(arguments: Sequence[str]) -> int:
    """Write a checkpoint for the arguments FOLDER and, optionally, FAMILY, and print its folder.

    Returns:
        Exit status: 0, or 2 after a usage message on standard error for other arguments.
    """
    if not 1 <= len(arguments) <= 2 or arguments[-1] not in (arguments[0], *FAMILIES):
        print(f"usage: python -m {__spec__.name} FOLDER [{'|'.join(FAMILIES)}]", file=sys.stderr)
        return 2
    print(make_tiny_checkpoint(Path(arguments[0]), *arguments[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
