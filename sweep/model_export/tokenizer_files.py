"""A cell's tokenizer as files that transformers loads: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..data.tokenizer import (
    ByteTokenizer,
    FlipFlopTokenizer,
    Gpt2Tokenizer,
    JsonTokenizer,
    MadTokenizer,
    RecallTokenizer,
    Tokenizer,
)
from ..errors import SweepError

if TYPE_CHECKING:
    import tokenizers

END = "<|endoftext|>"
"""Text of the end-of-text token where the tokenizer itself gives it none."""


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the tokenizer's files by name; ids are those of `tokenizer.encode`, with the end-of-text token before them.

    That token precedes every document in training. `add_special_tokens=False` leaves it out. Special tokens written out
    in a text are plain text, as for the cell itself.

    Raises:
        SweepError: This kind of tokenizer has no such file.
    """
    import tokenizers
    from tokenizers import processors

    if isinstance(tokenizer, JsonTokenizer):
        model, end = tokenizers.Tokenizer.from_buffer(tokenizer.content), tokenizer.end_of_text
        model.no_truncation()
        model.no_padding()
        model.add_special_tokens([end])
    elif isinstance(tokenizer, Gpt2Tokenizer):
        model, end = _byte_pairs(tokenizer.token_bytes, tokenizer.vocabulary, tokenizer.eot, split=True), END
    elif isinstance(tokenizer, ByteTokenizer):
        model, end = _byte_pairs(tokenizer.token_bytes, tokenizer.vocabulary, tokenizer.eot, split=False), END
    elif isinstance(tokenizer, FlipFlopTokenizer | RecallTokenizer | MadTokenizer):
        end = "_" if isinstance(tokenizer, RecallTokenizer) else END
        model = _symbols(tokenizer, end)
    else:
        raise SweepError(f"tokenizer {tokenizer.name} cannot be written for transformers; its cells cannot be exported")
    model.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A {end} $B:1", special_tokens=[(end, tokenizer.eot)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "pad_token": end,
        "unk_token": None, "padding_side": "left", "split_special_tokens": True, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    return {
        "tokenizer.json": model.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps({"bos_token": end, "eos_token": end, "pad_token": end}, indent=2) + "\n",
    }


def _letters() -> dict[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte, by byte.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order (GPT-2).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(unprintable)}


def _byte_pairs(token_bytes: Callable[[int], bytes], vocabulary: int, eot: int, *, split: bool) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with the same ids.

    Merges follow from the ranks: a token of several bytes is the merge of the two parts that its own bytes, merged in
    order of rank by smaller tokens, end in.

    Args:
        token_bytes: Function from an id to the bytes that it stands for.
        vocabulary: Number of ids.
        eot: Id of the end-of-text token.
        split: Split text into words first, as GPT-2 does.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    letters = _letters()
    tokens = {token: token_bytes(token) for token in range(vocabulary) if token != eot}
    rank = {word: token for token, word in tokens.items()}
    written = {token: "".join(letters[byte] for byte in word) for token, word in tokens.items()}
    merges = [
        (written[rank[first]], written[rank[second]])
        for token, word in tokens.items()
        if len(word) > 1
        for first, second in [_last_merge(word, rank, token)]
    ]  # fmt: skip
    entries = {text: token for token, text in written.items()} | {END: eot}
    model = tokenizers.Tokenizer(models.BPE(vocab=entries, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return model


def _last_merge(word: bytes, rank: dict[bytes, int], limit: int) -> tuple[bytes, bytes]:
    """Return the two parts of a token that byte-pair encoding merges last.

    Merges pairs of neighbours in order of rank, among tokens of a rank below `limit`, until two parts remain.
    """
    parts = [word[index : index + 1] for index in range(len(word))]
    while len(parts) > 2:
        ranks = [rank.get(parts[index] + parts[index + 1], limit) for index in range(len(parts) - 1)]
        lowest = min(range(len(ranks)), key=ranks.__getitem__)
        parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
    return parts[0], parts[1]


def _symbols(tokenizer: FlipFlopTokenizer | RecallTokenizer | MadTokenizer, end: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of whole symbols with the same ids: letters, or tokens between white space."""
    import tokenizers
    from tokenizers import AddedToken, Regex, models, pre_tokenizers

    has_spaces = not isinstance(tokenizer, FlipFlopTokenizer)
    entries = {tokenizer.token_bytes(token).decode().strip(): token for token in range(tokenizer.vocabulary)}
    entries.pop("", None)
    model = tokenizers.Tokenizer(models.WordLevel(vocab=entries | {end: tokenizer.eot}, unk_token=None))
    model.pre_tokenizer = (
        pre_tokenizers.WhitespaceSplit() if has_spaces else pre_tokenizers.Split(Regex("."), "isolated")
    )
    model.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return model
