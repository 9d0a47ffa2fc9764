"""Exported cells in transformers itself: the same logits, the same text, for every mixer, memory and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.hf import CellForCausalLM
from atma_sweep.model import registry
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.inference.decode import make_decoder
from atma_sweep.model.inference.generation import generate_tokens
from atma_sweep.sweep.attempt.trained_cells import LoadedModel
from atma_sweep.sweep.data.tokenizer import Gpt2Tokenizer, JsonTokenizer, load_tokenizer
from atma_sweep.sweep.external_models.conversion import open_hub_weights
from atma_sweep.sweep.external_models.hub_checkpoint import InvalidCheckpoint
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.model_export.huggingface import write_model_folder
from atma_sweep.sweep.model_export.tokenizer_files import tokenizer_files
from atma_sweep.sweep.planning.initial_weights import WeightsFinder
from bench import Bench
from factories import cell_record, fingerprint
from optional_data import optional_data
from tiers import every_nth

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHAPE = {
    "d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 264, "window_size": 8,
}  # fmt: skip
PARTS = [
    *({"attn_type": name} for name in registry.MIXERS),
    *({"attn_type": "nope", "memory": name} for name in registry.MEMORIES),
    *({"attn_type": "nope", "positions": name} for name in registry.POSITIONS),
    {"attn_type": "polar", "memory": "gated_delta", "window": True},
    {"attn_type": "rope", "tie_head": True, "logit_cap": "none", "mlp": "swiglu"},
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.6},
]


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers copies modeling files into a cache of modules; every test has its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "modules"))
        yield


def untrained(**model: object) -> LoadedModel:
    """A network whose every weight is random, those that begin at zero too, behind the tokenizer of bytes."""
    config = load_grid("quick").expand(fingerprint)[0].config
    config = config.model_copy(update={"model": ModelConfig.model_validate(SHAPE | model)})
    network = build(config.model, seed=1).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1, generator=draw)
    return LoadedModel(network, load_tokenizer("bytes"), config, "c" * 12, "slug")


def exported(folder: Path, **model: object) -> tuple[LoadedModel, object]:
    loaded = untrained(**model)
    folder.mkdir()
    write_model_folder(folder, loaded, cell_record("c"), [], "1")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(theirs).__module__.startswith("transformers_modules"), "loaded by the folder's own file"
    return loaded, theirs


@pytest.mark.parametrize("parts", every_nth(PARTS, 11), ids=lambda parts: "-".join(map(str, parts.values())))
def test_logits_and_greedy_text_are_ours(tmp_path: Path, parts: dict[str, object]) -> None:
    loaded, theirs = exported(tmp_path / "model", **parts)
    tokens_BT = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(tokens_BT).logits, loaded.model(tokens_BT), atol=1e-5, rtol=0)
        short, long = tokens_BT[:1, :9], tokens_BT[1:, :16]
        padded = torch.cat([torch.full((1, 7), 256), short], 1)
        mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 9)], 1).long()
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        both = theirs.generate(
            torch.cat([padded, long]), attention_mask=torch.cat([mask, torch.ones_like(mask)]), **options
        )
        ours = [
            list(generate_tokens(loaded.model, prompt[0], tokens=6, temperature=0, vocabulary=257))
            for prompt in (short, long)
        ]
        assert both[:, 16:].tolist() == ours
        uncached = theirs.generate(torch.cat([padded, long]), attention_mask=torch.cat([mask, torch.ones_like(mask)]), use_cache=False, **options)  # fmt: skip
        assert uncached.tolist() == both.tolist()
        for seed, options in enumerate(SAMPLINGS):
            expected = list(generate_tokens(loaded.model, short[0], tokens=6, seed=seed, vocabulary=257, **options))
            for use_cache in (True, False):
                torch.manual_seed(seed)
                drawn = theirs.generate(
                    short,
                    do_sample=True,
                    max_new_tokens=6,
                    eos_token_id=None,
                    use_cache=use_cache,
                    **{"top_k": 0} | options,
                )
                assert drawn[0, 9:].tolist() == expected, options
        assert text_in_a_batch(loaded.model, short[0], long[0], seed=0, **SAMPLINGS[0]) == list(
            generate_tokens(loaded.model, short[0], tokens=6, seed=0, vocabulary=257, **SAMPLINGS[0])
        )


def text_in_a_batch(model: Backbone, prompt_T: torch.Tensor, second_T: torch.Tensor, **options: Any) -> list[int]:
    """The continuation of a prompt whose steps alternate with those of another text in the same decoder."""
    decoder = make_decoder(model, texts=2, tokens=len(prompt_T) + len(second_T) + 6)
    texts = [generate_tokens(model, text_T, tokens=6, vocabulary=257, decoder=decoder, **options) for text_T in (second_T, prompt_T)]  # fmt: skip
    return [token for _, token in zip(*texts, strict=True)]


def test_right_padding_is_not_read(tmp_path: Path) -> None:
    loaded, theirs = exported(tmp_path / "model", attn_type="nope", memory="gated_delta")
    tokens_BT = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(4))
    mask_BT = torch.ones(2, 12, dtype=torch.long)
    mask_BT[0, 7:] = 0
    with torch.inference_mode():
        logits_BTV = theirs(tokens_BT, attention_mask=mask_BT).logits
        torch.testing.assert_close(logits_BTV[0, :7], loaded.model(tokens_BT[:1, :7])[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(logits_BTV[1:], loaded.model(tokens_BT[1:]), atol=1e-5, rtol=0)
        assert not logits_BTV[0, 7:].any()


def test_sampling_and_beams_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    _, theirs = exported(tmp_path / "model", attn_type="polar", memory="gated_delta")
    tokens_BT = torch.randint(0, 257, (2, 10), generator=torch.Generator().manual_seed(5))
    for options in (
        {"do_sample": True, "top_p": 0.9},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
    ):
        texts = []
        for cached in (True, False):
            torch.manual_seed(6)
            texts.append(theirs.generate(tokens_BT, max_new_tokens=6, use_cache=cached, eos_token_id=None, **options))
        assert texts[0].tolist() == texts[1].tolist()


def test_loss_and_gradients_are_those_of_cross_entropy(tmp_path: Path) -> None:
    loaded, theirs = exported(tmp_path / "model", attn_type="nope")
    tokens_BT = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(7))
    labels_BT = tokens_BT.clone()
    labels_BT[0, :5] = -100
    result = theirs(tokens_BT, labels=labels_BT)
    log_p = loaded.model(tokens_BT)[:, :-1].double().log_softmax(-1)
    picked = log_p.gather(-1, tokens_BT[:, 1:, None])[..., 0]
    counted = labels_BT[:, 1:] != -100
    assert result.loss.item() == pytest.approx(-picked[counted].mean().item(), abs=1e-6)
    result.loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())


def test_save_and_reload_keep_every_bit(tmp_path: Path) -> None:
    _, theirs = exported(tmp_path / "model", attn_type="polar", memory="omega")
    theirs.save_pretrained(tmp_path / "again")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    tokenizer.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    text = transformers.pipeline("text-generation", model=str(tmp_path / "again"), trust_remote_code=True)
    written = text("def f", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert written.startswith("def f")
    assert len(written) > 5
    half = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", trust_remote_code=True, dtype=torch.bfloat16
    )
    assert (half.network.dtype, half.network.blocks[0].mlp.fc.weight.dtype) == (torch.bfloat16, torch.float32)


def test_half_an_export_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    exported(tmp_path / "model", attn_type="nope")
    weights, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    content, state = weights.read_bytes(), load_file(weights)
    first, *remaining = sorted(state)

    def refused() -> tuple[str, str]:
        """The messages of transformers and of `train.init_from`, both with one line."""
        with pytest.raises(OSError) as theirs:  # noqa: PT011 - transformers' own class
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
        with pytest.raises(InvalidCheckpoint) as ours:
            open_hub_weights(tmp_path / "model")
        assert "\n" not in f"{theirs.value}{ours.value}"
        assert str(theirs.value).endswith("export the cell again: atma-sweep export CELL --to hf FOLDER")
        return str(theirs.value), str(ours.value)

    for damaged in (content[:-9], bytes([*content[:-1], content[-1] ^ 1])):
        weights.write_bytes(damaged)
        assert all("is incomplete or was changed" in message for message in refused())
    weights.unlink()
    assert all("holds no weights, so it is half an export" in message for message in refused())
    # exports of older versions have no hash
    facts = {key: value for key, value in json.loads(config.read_text()).items() if key != "weights_sha256"}
    config.write_text(json.dumps(facts))
    weights.write_bytes(content[:-9])
    assert all("file not fully covered" in message for message in refused())
    for changed, problem in (
        ({name: state[name] for name in remaining[1:]}, f"lack a tensor of the network: {first} and 1 more;"),
        ({name: state[name] for name in remaining}, f"lack a tensor of the network: {first};"),
        (state | {"network.more": torch.zeros(2)}, "hold a tensor that the network lacks: network.more;"),
        (state | {first: state[first][:-1].clone()}, f"have another shape than the network's for tensor: {first};"),
    ):
        save_file(changed, weights, metadata={"format": "pt"})
        with pytest.raises(OSError, match=problem):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    config.unlink()
    with pytest.raises(OSError, match=r"has no config\.json, .*; name a folder written by [^\n]*\Z"):
        CellForCausalLM.from_pretrained(tmp_path / "model")


def test_exported_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is that of a line per file, as in ids of cells so far."""
    exported(tmp_path / "model", attn_type="nope")
    content = hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()
    hashed: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, *arguments: Any) -> Any:
        hashed.append(Path(file.name).name)
        return digest(file, *arguments)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    finder = WeightsFinder(None, tmp_path)
    weights = finder(f"hf:{tmp_path / 'model'}")
    assert weights.sha256 == hashlib.sha256(f"model.safetensors:{content}\n".encode()).hexdigest()
    finder.state(f"hf:{tmp_path / 'model'}")
    assert hashed == ["model.safetensors"]


TEXTS = (
    "",
    "Hello world",
    "  def f(x):\n\treturn x  ",
    "naïve 中文 🙂 \u200d",
    "\x00\x7f 1234 don't",
    "a<|endoftext|>b",
)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bytes", "flipflop", "mqar", "mad", "gpt2", "json"])
def test_tokenizers_give_the_same_ids(tmp_path: Path, kind: str) -> None:
    texts: tuple[str, ...] = TEXTS
    if kind == "gpt2":
        tokenizer = Gpt2Tokenizer(optional_data("data/gpt2/vocab.bpe"))
    elif kind == "json":
        file = tmp_path / "trained.json"
        file.write_text(_trained_tokenizer())
        tokenizer = JsonTokenizer(file)
    else:
        tokenizer = load_tokenizer(kind)
        texts = {"flipflop": ("", "w1i0r1"), "mqar": ("", "k3 v17 _ k511"), "mad": ("", "t3 t8191")}.get(kind, TEXTS)
    for name, content in tokenizer_files(tokenizer).items():
        (tmp_path / name).write_text(content)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == [tokenizer.eot, *ids]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        if kind in ("bytes", "gpt2"):
            assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (tokenizer.eot,) * 3


def _trained_tokenizer() -> str:
    """The file of a small byte-pair tokenizer, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    model.train_from_iterator(["hello world, return def"] * 20, trainer)
    return str(model.to_str())


@pytest.mark.thorough
def test_export_command_writes_a_complete_folder_or_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.launch("--only", "attn_type=polar")
    out = json.loads(bench.run("export", "polar", "model", "--to", "hf", "--json"))
    card = (tmp_path / "model" / "README.md").read_text()
    ((loss,),) = bench.sql("SELECT value FROM results WHERE metric = 'val_loss'")
    assert f"| val val_loss | {loss:.6g} | nats/token |" in card
    assert "README.md" in out["files"]
    assert out["parameters"] == 22_032
    for arguments, message in (
        (("export", "polar", "model", "--to", "hf"), "is not an empty folder"),
        (("export", "--to", "hf"), "name it: atma-sweep export CELL --to hf FOLDER"),
        (("export", "polar", "other"), "add --to hf"),
        (("export", "nope", "other", "--to", "hf"), "nope"),
    ):
        process = bench.start(*arguments)
        text, _ = process.communicate()
        assert process.returncode == 2, text
        assert message in text
        assert len(text.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["atma-runs", "model", "text"]
