"""Which folders are checkpoints that can be measured, and the one line for each that is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.external_models import hub_checkpoint
from atma_sweep.sweep.external_models.hub_checkpoint import InvalidCheckpoint, WeightsUnavailable, resolve_checkpoint
from refusals import refused

pytestmark = pytest.mark.thorough


def folder(place: Path, **config: object) -> Path:
    """What a checkpoint consists of, as far as nobody loads it."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192, **config}))
    (place / "model.safetensors").write_bytes(b"weights")
    (place / "tokenizer.json").write_text("{}")
    return place


def test_a_folder_is_what_its_files_are(tmp_path: Path) -> None:
    one, other = (
        resolve_checkpoint(f"hf:{folder(tmp_path / 'a' / 'm')}"),
        resolve_checkpoint(str(folder(tmp_path / "b" / "m"))),
    )
    assert (one.name, one.context, one.max_positions, one.family) == ("m", 8192, None, "llama")
    assert one.revision.startswith("sha256:")
    assert (one.revision, one.tokenizer) == (other.revision, other.tokenizer)
    (tmp_path / "b" / "m" / "model.safetensors").write_bytes(b"others")
    changed = resolve_checkpoint(str(tmp_path / "b" / "m"))
    assert changed.revision != one.revision
    assert changed.tokenizer == one.tokenizer
    (tmp_path / "b" / "m" / "tokenizer.json").write_text("{ }")
    assert resolve_checkpoint(str(tmp_path / "b" / "m")).tokenizer != one.tokenizer


def test_a_table_of_positions_has_an_end(tmp_path: Path) -> None:
    found = resolve_checkpoint(str(folder(tmp_path / "m", model_type="gpt2", n_positions=1024)))
    assert (found.context, found.max_positions) == (1024, 1024)


@pytest.mark.parametrize(("family", "types"), [
    ("granite", ["float32", "float32"]), ("granitemoehybrid", ["float32", "float32"]),
    ("gemma3_text", ["float32", "float32"]), ("qwen3", ["float32", "bfloat16"]), ("lfm2", ["float32", "bfloat16"]),
])  # fmt: skip
def test_halves_only_where_the_paper_has_them(family: str, types: list[str], tmp_path: Path) -> None:
    found = resolve_checkpoint(str(folder(tmp_path / "m", model_type=family)))
    assert [found.dtype(cuda=cuda) for cuda in (False, True)] == types


def test_linear_attention_of_qwen_needs_a_gpu(tmp_path: Path) -> None:
    found = resolve_checkpoint(str(folder(tmp_path / "m", model_type="qwen3_5_text")))
    with pytest.raises(MachineError, match="resources have gpus: 1"):
        found.check(cuda=False)
    found.check(cuda=True)
    resolve_checkpoint(str(folder(tmp_path / "n", model_type="lfm2"))).check(cuda=False)


def told(word: str, error: type[Exception], revision: str | None = None) -> str:
    assert error.exit_code == (3 if issubclass(error, MachineError) else 2)  # type: ignore[attr-defined]
    return refused(lambda: resolve_checkpoint(word, revision), error)


def test_weights_that_could_run_code_are_refused(tmp_path: Path) -> None:
    place = folder(tmp_path / "m")
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    assert "holds its weights as pytorch_model.bin alone, a format that can run code" in told(
        str(place), InvalidCheckpoint
    )


def test_code_of_its_own_is_never_run(tmp_path: Path) -> None:
    place = folder(tmp_path / "m", model_type="qwen33", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (place / "modeling.py").write_text("raise SystemExit('ran')")
    said = told(str(place), InvalidCheckpoint)
    assert "'qwen33' is no language model" in said
    assert "its own code is never run; the nearest is 'qwen3" in said


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    place = folder(tmp_path / "m")
    (place / "model.safetensors").unlink()
    assert "put the checkpoint's *.safetensors beside its config.json" in told(str(place), WeightsUnavailable)
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    (place / "model-1.safetensors").write_bytes(b"")
    assert "lacks 1 of the 2 files of weights" in told(str(place), WeightsUnavailable)
    (place / "model-2.safetensors").write_bytes(b"")
    (place / "tokenizer.json").unlink()
    assert "has no tokenizer" in told(str(place), InvalidCheckpoint)
    (place / "config.json").write_text("[")
    assert "is no JSON" in told(str(place), InvalidCheckpoint)
    (place / "config.json").unlink()
    assert "has no config.json" in told(str(place), InvalidCheckpoint)
    assert "neither a folder nor a repository" in told("hf:a/b/c", InvalidCheckpoint)
    assert "--revision main" in told(str(tmp_path), InvalidCheckpoint, "main")


def test_a_model_that_is_not_here_says_what_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[bool] = []

    def away(name: str, *, local_files_only: bool, **more: object) -> str:
        asked.append(local_files_only)
        assert "*.bin" not in more["allow_patterns"]  # type: ignore[operator]
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", away)
    said = told("hf:Qwen/Qwen3-0.6B-Base", WeightsUnavailable, "abc")
    assert asked == [True, False], "first what lies here"
    assert "run `hf download Qwen/Qwen3-0.6B-Base --revision abc --local-dir Qwen3-0.6B-Base`" in said
    assert said.endswith("evaluate hf:Qwen3-0.6B-Base")

    place = folder(tmp_path / "snapshots" / "0123abcd")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **more: str(place))
    found = resolve_checkpoint("hf:Qwen/Qwen3-0.6B-Base")
    assert (found.name, found.short, found.revision) == ("Qwen/Qwen3-0.6B-Base", "Qwen3-0.6B-Base", "0123abcd")
    shutil.rmtree(place)


def test_without_transformers_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_checkpoint.importlib.util, "find_spec", lambda name: None)
    assert told("hf:a/b", MachineError).endswith("pip install 'atma-sweep[hf]'")
