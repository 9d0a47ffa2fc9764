"""Folders that are usable checkpoints, and the error for each that is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from atma_sweep.sweep.errors import MachineError
from atma_sweep.sweep.external_models import hub_checkpoint
from atma_sweep.sweep.external_models.hub_checkpoint import InvalidCheckpoint, WeightsUnavailable, resolve_checkpoint
from atma_sweep.sweep.external_models.subject import load_model
from refusals import refused
from safetensors.torch import save

pytestmark = pytest.mark.thorough


def weights(text: str = "weights") -> bytes:
    """Return a safetensors file without tensors, whose header has this text."""
    return save({}, metadata={"text": text})


def folder(path: Path, **config: object) -> Path:
    """Write the files of a checkpoint, with weights that have no tensors."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192, **config}))
    (path / "model.safetensors").write_bytes(weights())
    (path / "tokenizer.json").write_text("{}")
    return path


def test_checkpoint_identity_follows_files(tmp_path: Path) -> None:
    first, second = (
        resolve_checkpoint(f"hf:{folder(tmp_path / 'a' / 'm')}"),
        resolve_checkpoint(str(folder(tmp_path / "b" / "m"))),
    )
    assert (first.name, first.context, first.max_positions, first.family) == ("m", 8192, None, "llama")
    assert first.revision.startswith("sha256:")
    assert (first.revision, first.tokenizer) == (second.revision, second.tokenizer)
    (tmp_path / "b" / "m" / "model.safetensors").write_bytes(weights("others"))
    changed = resolve_checkpoint(str(tmp_path / "b" / "m"))
    assert changed.revision != first.revision
    assert changed.tokenizer == first.tokenizer
    (tmp_path / "b" / "m" / "tokenizer.json").write_text("{ }")
    assert resolve_checkpoint(str(tmp_path / "b" / "m")).tokenizer != first.tokenizer


def test_checkpoint_with_position_table_has_limit(tmp_path: Path) -> None:
    checkpoint = resolve_checkpoint(str(folder(tmp_path / "m", model_type="gpt2", n_positions=1024)))
    assert (checkpoint.context, checkpoint.max_positions) == (1024, 1024)


@pytest.mark.parametrize(("family", "types"), [
    ("granite", ["float32", "float32"]), ("granitemoehybrid", ["float32", "float32"]),
    ("gemma3_text", ["float32", "float32"]), ("qwen3", ["float32", "bfloat16"]), ("lfm2", ["float32", "bfloat16"]),
])  # fmt: skip
def test_checkpoint_dtype_by_family(family: str, types: list[str], tmp_path: Path) -> None:
    checkpoint = resolve_checkpoint(str(folder(tmp_path / "m", model_type=family)))
    assert [checkpoint.dtype(cuda=cuda) for cuda in (False, True)] == types


def test_checkpoint_of_qwen_linear_attention_needs_gpu(tmp_path: Path) -> None:
    checkpoint = resolve_checkpoint(str(folder(tmp_path / "m", model_type="qwen3_5_text")))
    with pytest.raises(MachineError, match="resources have gpus: 1"):
        checkpoint.check(cuda=False)
    checkpoint.check(cuda=True)
    resolve_checkpoint(str(folder(tmp_path / "n", model_type="lfm2"))).check(cuda=False)


def error_text(word: str, error: type[Exception], revision: str | None = None) -> str:
    assert error.exit_code == (3 if issubclass(error, MachineError) else 2)  # type: ignore[attr-defined]
    return refused(lambda: resolve_checkpoint(word, revision), error)


def test_checkpoint_rejects_pickled_weights(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "holds its weights only as pytorch_model.bin, a format that can run code" in error_text(
        str(path), InvalidCheckpoint
    )


def test_checkpoint_rejects_custom_code(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", model_type="qwen33", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (path / "modeling.py").write_text("raise SystemExit('ran')")
    message = error_text(str(path), InvalidCheckpoint)
    assert "has no language model of type 'qwen33'" in message
    assert "code that comes with a checkpoint is never run; the nearest type is 'qwen3" in message
    message = error_text(str(folder(tmp_path / "cell", model_type="atma-sweep")), InvalidCheckpoint)
    assert (
        f"holds a cell that atma-sweep exported; name the cell instead, or train from the folder with train.init_from: hf:{tmp_path}"
        in message
    )


def test_checkpoint_reports_missing_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    assert "put the checkpoint's *.safetensors next to its config.json" in error_text(str(path), WeightsUnavailable)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    (path / "model-1.safetensors").write_bytes(weights())
    assert "lacks 1 of the 2 weight files" in error_text(str(path), WeightsUnavailable)
    (path / "model-2.safetensors").write_bytes(weights())
    (path / "tokenizer.json").unlink()
    assert "has no tokenizer" in error_text(str(path), InvalidCheckpoint)
    for content, problem in (("[", "is not valid JSON"), ("{}", "names no model_type"), (None, "has no config.json")):
        (path / "config.json").unlink() if content is None else (path / "config.json").write_text(content)
        message = error_text(str(path), InvalidCheckpoint)
        assert problem in message
        assert message.endswith(hub_checkpoint.FOLDER_REMEDY)
        with pytest.raises(InvalidCheckpoint, match=problem):  # an attempt on a folder that has changed since
            load_model(path, torch.float32, torch.device("cpu"))
    assert "neither a folder nor a repository" in error_text("hf:a/b/c", InvalidCheckpoint)
    assert "--revision main" in error_text(str(tmp_path), InvalidCheckpoint, "main")


def test_checkpoint_download_error_gives_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    local_only: list[bool] = []

    def away(name: str, *, local_files_only: bool, **more: object) -> str:
        local_only.append(local_files_only)
        assert "*.bin" not in more["allow_patterns"]  # type: ignore[operator]
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", away)
    message = error_text("hf:Qwen/Qwen3-0.6B-Base", WeightsUnavailable, "abc")
    assert local_only == [True, False], "first what lies here"
    assert "run `hf download Qwen/Qwen3-0.6B-Base --revision abc --local-dir Qwen3-0.6B-Base`" in message
    assert message.endswith("copy that folder here and name it hf:Qwen3-0.6B-Base")

    path = folder(tmp_path / "snapshots" / "0123abcd")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **more: str(path))
    checkpoint = resolve_checkpoint("hf:Qwen/Qwen3-0.6B-Base")
    assert (checkpoint.name, checkpoint.short_name, checkpoint.revision) == (
        "Qwen/Qwen3-0.6B-Base",
        "Qwen3-0.6B-Base",
        "0123abcd",
    )
    shutil.rmtree(path)


def test_checkpoint_without_transformers_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_checkpoint.importlib.util, "find_spec", lambda name: None)
    assert error_text("hf:a/b", MachineError).endswith("pip install 'atma-sweep[hf]'")
