"""Every file of examples/ works as its first lines say, at a tiny size, and computes what it claims."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import atma_sweep
import pytest
import torch
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.registry import MEMORIES, MIXERS
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.data.prepare import prepare
from atma_sweep.sweep.grid.plugins import load_plugins
from atma_sweep.sweep.reference.part_facts import contract_problem
from bench import COMMAND
from patience import PATIENCE_S
from registries import scope
from ruamel.yaml import YAML

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GRIDS = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.glob("*/*.yaml") if path.parent.name != "ray")
PLUGINS = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.glob("*/*.py"))
DOCUMENTS = [EXAMPLES.parent / "README.md", *sorted((EXAMPLES.parent / "docs").rglob("*.md"))]
TINY = [
    *("model.d_model=16", "model.n_layers=3", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=8"),
    *("train.tokens=4096", "train.seq_len=32", "train.batch_tokens=128", "train.micro_batch=2"),
    *("eval.documents=2", "eval.junk_rows=2", "eval.needle_trials=2", "eval.validation_tokens=256"),
]


@contextmanager
def plugin(name: str) -> Iterator[None]:
    """The plugin file examples/NAME is loaded, and forgotten afterwards."""
    with scope():
        load_plugins([EXAMPLES / name])
        yield
    for module in [module for module in sys.modules if module.startswith("atma_sweep_plugin_")]:
        del sys.modules[module]


def commands(comment: str, pattern: str) -> list[str]:
    """Return the commands in the indented lines of a file's first comment that match a pattern."""
    return [line for line in re.findall(r"^#     (.*)$", comment, re.MULTILINE) if re.search(pattern, line)]


@pytest.mark.parametrize("path", [*GRIDS, *PLUGINS], ids=str)
def test_first_lines_name_a_grid_of_the_folder(path: Path) -> None:
    """Launch commands in the comments of a plugin name a grid beside it that lists the plugin."""
    text = (EXAMPLES / path).read_text()
    assert text.startswith("# ")
    if path.suffix == ".py":
        named = re.findall(r"atma-sweep launch examples/(\S+\.yaml)", text)
        assert named
        assert {Path(name) for name in named} <= set(GRIDS)
        for name in named:
            assert YAML(typ="safe").load(EXAMPLES / name)["plugins"] == [path.name]


def test_shown_code_is_that_of_the_example() -> None:
    """A block of a document that begins with the name of an example is that file, but for its first comment."""
    by_name = {path.name: (EXAMPLES / path).read_text() for path in PLUGINS}
    for document in DOCUMENTS:
        for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", document.read_text(), re.M | re.S):
            if name in by_name:
                assert re.sub(r"\A(#.*\n)+", "", by_name[name]) == code, f"{document}: {name}"


@pytest.mark.thorough
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grid_trains_and_reports_every_cell(tmp_path: Path, grid: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    environment = {key: value for key, value in os.environ.items() if key != "ATMA_DB"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    settings = [word for setting in TINY for word in ("--set", setting)]
    run(
        "launch",
        f"examples/{grid}",
        "--executor",
        "local",
        "--name",
        "tried",
        "--set",
        "eval.lengths=[32,64]",
        *settings,
    )
    design = YAML(typ="safe").load(EXAMPLES / grid)
    with closing(sqlite3.connect(tmp_path / "atma.db")) as database:
        cells = database.execute("SELECT DISTINCT slug, state, attn_type, memory FROM results").fetchall()
        measured = database.execute("SELECT slug, length, value FROM results WHERE metric = 'gain'").fetchall()
    assert {state for _, state, _, _ in cells} == {"done"}
    assert {mixer for _, _, mixer, _ in cells} == set(design["axes"]["attn_type"])
    assert len(cells) == {"mixer": 2, "block-mixer": 2, "memory": 3, "probe": 2, "corpus": 2}[grid.parent.name]
    table = run("report", "--table", "6")
    assert all(mixer in table for mixer in design["axes"]["attn_type"])
    if grid.parent.name == "probe":
        assert sorted((slug, length) for slug, length, _ in measured) == sorted(
            (slug, length) for slug, *_ in cells for length in (32, 64)
        )
        check_repetition(tmp_path, measured)


def check_repetition(folder: Path, measured: list[tuple[str, int, float]]) -> None:
    """The stored numbers of the probe are those of the kept weights, with the loss written out."""
    for slug, length, value in measured:
        trained = atma_sweep.load(slug, db=folder / "atma.db")
        fingerprint = trained.config.data.fingerprint
        assert fingerprint is not None
        corpus = open_corpus(folder / "atma-runs" / "corpora", fingerprint)
        first, second = [], []
        for document in corpus.heldout[:2]:
            passage = torch.tensor(document[: length // 2].tolist())
            tokens_BT = torch.cat([passage, passage])[None]
            with torch.no_grad():
                logits_TV = trained.model(tokens_BT)[0].double().log_softmax(-1)
            losses = [-float(logits_TV[step, tokens_BT[0, step + 1]]) for step in range(length - 1)]
            first += losses[: length // 2 - 1]
            second += losses[length // 2 :]
        gain = sum(second) / len(second) - sum(first) / len(first)
        assert value == pytest.approx(gain, abs=2e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_mixer_is_a_weighted_mean_of_values(window: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    v_BTJX = torch.randn(2, 7, 1, 4, generator=draw, dtype=torch.float64)
    q_BTHX = torch.randn(2, 7, 2, 4, generator=draw, dtype=torch.float64)
    with plugin("mixer/my_mixer.py"):
        fade = MIXERS.load("fade")
        y_BTHX = fade(ModelConfig(), fade.Config(keep=0.5))(q_BTHX, v_BTJX, v_BTJX, window=window)
    for step in range(7):
        seen = range(max(0, step - (window or 7) + 1), step + 1)
        total = sum(0.5 ** (step - past) for past in seen)
        mean_BX = sum(0.5 ** (step - past) / total * v_BTJX[:, past, 0] for past in seen)
        for head in range(2):
            torch.testing.assert_close(y_BTHX[:, step, head], mean_BX)


def test_memory_is_a_moving_average_of_inputs() -> None:
    x_BTD = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with plugin("memory/my_memory.py"):
        average = MEMORIES.load("average")
        memory = average(ModelConfig(d_model=12), average.Config(decay=0.75)).double()
        assert memory(x_BTD, x_BTD, x_BTD, x_BTD).abs().max() == 0  # before training
        torch.nn.init.constant_(memory.gain, 2.0)
        y_BTD = memory(x_BTD, x_BTD, x_BTD, x_BTD)
        assert contract_problem("memory", "average") is None
    state_BD = torch.zeros(2, 12, dtype=torch.float64)
    for step in range(9):
        state_BD = 0.75 * state_BD + 0.25 * x_BTD[:, step]
        torch.testing.assert_close(y_BTD[:, step], 2 * state_BD)


def test_corpus_repeats_the_first_half_of_each_document(tmp_path: Path) -> None:
    with plugin("corpus/pairs.py"):
        corpus = open_corpus(tmp_path, prepare(DataConfig(corpus="pairs", heldout_tokens=900), tmp_path))
    assert len(corpus.heldout) == 16
    for document in corpus.heldout:
        text = bytes(document.tolist()[1:]).decode()
        assert text[: len(text) // 2] == text[len(text) // 2 :]
        assert re.fullmatch(r"([a-h]\d ){320}", text)


@pytest.mark.thorough
def test_ray_cluster_file_fits_the_schema_of_ray() -> None:
    """Ray's own JSON schema accepts it; every option of its commands is one of `ray start`."""
    autoscaler = pytest.importorskip("ray.autoscaler", reason="needs Ray: pip install -e '.[train]'")
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install -e '.[test]'")
    cluster = YAML(typ="safe").load(EXAMPLES / "ray" / "cluster.yaml")
    jsonschema.validate(cluster, json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text()))
    starts = [
        command
        for role in ("head", "worker")
        for command in cluster[f"{role}_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        assert set(re.findall(r"--[\w-]+", command)) <= start_options()
        assert "RAY_AUTH_MODE=token" in command
    assert "~/.ray/auth_token" in cluster["file_mounts"]


def start_options() -> set[str]:
    """Return the options of `ray start`, from its help."""
    program = "import sys; from ray.scripts.scripts import main; sys.argv = ['ray', 'start', '--help']; main()"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(re.findall(r"--[\w-]+", shown.stdout))


@pytest.mark.thorough
def test_kuberay_file_is_consistent() -> None:
    """Names that refer to each other agree; requests equal limits, and the versions are those that are tested."""
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[train]'")
    claim, cluster = YAML(typ="safe").load_all(EXAMPLES / "ray" / "kuberay.yaml")
    assert (claim["kind"], cluster["kind"], cluster["apiVersion"]) == (
        "PersistentVolumeClaim",
        "RayCluster",
        "ray.io/v1",
    )
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    constraints = (EXAMPLES.parent / "constraints.txt").read_text()
    assert f"ray=={cluster['spec']['rayVersion']}" in constraints
    groups: list[dict[str, Any]] = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= start_options()
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["env"][0]["name"] == "ATMA_DB"
        secret = container["env"][0]["valueFrom"]["secretKeyRef"]
        text = (EXAMPLES / "ray" / "kuberay.yaml").read_text()
        assert f"secret generic {secret['name']} --from-literal={secret['key']}=" in text
        assert (
            f"--address {cluster['metadata']['name']}-head-svc:6379 --runs {container['volumeMounts'][0]['mountPath']}"
            in text
        )


def test_every_command_in_a_comment_parses(command_line: Callable[..., tuple[int, str, str]]) -> None:
    """Options of every `atma-sweep` command in the first lines of an example are options of that command."""
    n_commands = 0
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix not in (".py", ".yaml", ".sbatch"):
            continue
        for line in commands(path.read_text(), "atma-sweep"):
            for command, rest in re.findall(r"atma-sweep (launch|report|status|data prepare)\b([^&|#]*)", line):
                code, out, _ = command_line(*command.split(), "--help")
                assert code == 0
                assert set(re.findall(r"--[\w-]+", rest)) <= set(re.findall(r"--[\w-]+", out)), line
                n_commands += 1
    assert n_commands >= 8
