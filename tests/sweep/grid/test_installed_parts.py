"""Parts of installed packages: found by their names, hashed into ids, and harmless to whoever does not use them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench import Bench

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "plugin-package"
EVERY = Path(__file__).resolve().parents[2] / "testing" / "every_part"


def install(folder: Path, *, source: Path = EXAMPLE, name: str = "atma-fade", version: str = "1.0") -> Path:
    """Put a package where `pip install --target` would: its modules and its metadata."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(source / "src" / "atma_fade", folder / name.replace("-", "_"), dirs_exist_ok=True)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    text = (source / "pyproject.toml").read_text()
    sections = text.split("[project.entry-points.")[1:]
    lines = []
    for section in sections:
        heading, _, body = section.partition("]\n")
        lines.append(f"[{heading.strip(chr(34))}]")
        lines += [
            line.replace('"', "").replace("atma_fade", name.replace("-", "_"))
            for line in body.splitlines()
            if "=" in line
        ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.env["PYTHONPATH"] = str(install(tmp_path / "site"))
    bench.edit("attn_type: [nope, polar]", "attn_type: [fade, nope]")
    bench.edit("eval: {", "eval: {probes: [val, half_life], ")
    return bench


def run(bench: Bench, *arguments: str) -> tuple[int, str]:
    process = bench.start(*arguments)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def ids(bench: Bench) -> dict[str, str]:
    code, out = run(bench, "launch", "micro.yaml", "--dry-run", "--json", "--executor", "local")
    assert code == 0, out
    return {cell["attn_type"]: cell["cell"] for cell in json.loads(out)["cells"]}


@pytest.mark.thorough
@pytest.mark.slow
def test_installed_mixer_probe_table_and_figure_work(bench: Bench) -> None:
    assert run(bench, "launch", "micro.yaml", "--executor", "local")[0] == 0
    package = bench.folder / "site" / "atma_fade"
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    (config,) = (json.loads(text) for (text,) in bench.sql("SELECT config FROM cell WHERE attn_type = 'fade'"))
    assert config["model"]["mixer_source"] == digest.hexdigest()
    assert {plugin["path"] for plugin in config["plugins"]} == {
        "package:atma-fade==1.0:mixers.fade", "package:atma-fade==1.0:probes.half_life",
    }  # fmt: skip
    values = dict(bench.sql("SELECT attn_type, value FROM results WHERE probe = 'half_life'"))
    assert values == {"fade": pytest.approx(6.5788, abs=1e-3), "nope": None}
    code, out = run(bench, "report", "--table", "half-lives", "--format", "csv")
    assert code == 0, out
    assert out.splitlines()[1:] == ["fade,6.6", "nope,n/a"]
    code, out = run(bench, "report", "--list")
    assert "--table half-lives" in out
    assert "--figure half-life" in out
    code, out = run(bench, "report", "--figure", "half-life", "--json")
    assert [(row["mixer"], row["tokens"]) for row in json.loads(out)["rows"]] == [
        ("fade", pytest.approx(6.5788, abs=1e-3))
    ]
    assert run(bench, "report", "--figure", "half-life", "--out", "half-life.svg")[0] == 0
    assert run(bench, "report", "--check", "half-life.svg")[0] == 0
    code, out = run(bench, "evaluate", "fade-baseline-d0-m0-w0-s0", "--probe", "half_life", "--executor", "local")
    assert (code, "half_life tokens 6.57881" in out) == (0, True), out


@pytest.mark.thorough
def test_code_of_the_package_is_part_of_the_id(bench: Bench) -> None:
    before = ids(bench)
    mixer = bench.folder / "site" / "atma_fade" / "mixer.py"
    mixer.write_text(mixer.read_text().replace("0.9", "0.8"))
    after = ids(bench)
    assert before["fade"] != after["fade"]
    assert before["nope"] == after["nope"], "which uses nothing of it"


@pytest.mark.thorough
def test_broken_and_doubled_packages_stop_their_users_alone(bench: Bench) -> None:
    (bench.folder / "site" / "atma_fade" / "mixer.py").write_text("raise RuntimeError('no luck')\n")
    code, out = run(bench, "launch", "micro.yaml", "--executor", "local")
    assert code == 2
    assert out.strip().splitlines()[-1] == (
        "atma-sweep: mixers 'fade' of the installed package atma-fade 1.0 cannot be loaded: RuntimeError: no luck; "
        "upgrade or uninstall that package"
    )
    assert run(bench, "launch", "quick", "--dry-run")[0] == 0
    install(bench.folder / "site", name="fade-again", version="2.0")
    code, out = run(bench, "launch", "micro.yaml", "--executor", "local")
    assert code == 2
    assert "the installed packages atma-fade 1.0 and fade-again 2.0 both provide" in out.replace(
        "fade-again 2.0 and atma-fade 1.0", "atma-fade 1.0 and fade-again 2.0"
    )
    assert run(bench, "report", "--table", "6", "--sweep", "printed-v2")[0] == 0


@pytest.mark.thorough
def test_missing_package_is_named_by_whoever_needs_it(bench: Bench) -> None:
    assert run(bench, "launch", "micro.yaml", "--executor", "local")[0] == 0
    del bench.env["PYTHONPATH"]
    code, out = run(bench, "evaluate", "fade-baseline-d0-m0-w0-s0", "--executor", "local")
    assert code == 2
    assert "mixers 'fade' is not installed here; pip install atma-fade==1.0" in out
    assert run(bench, "report", "--table", "6")[0] == 0


def pip_install(source: Path, folder: Path) -> Path:
    """Install a package's folder into `folder`/site, as pip does, and return that."""
    shutil.copytree(source, folder / "package")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", folder / "site", folder / "package"], check=True, env=os.environ)
    return folder / "site"


@pytest.mark.thorough
def test_example_builds_with_pip(tmp_path: Path) -> None:
    """The folder is a package that setuptools accepts; its metadata have the entry points of pyproject.toml."""
    site = pip_install(EXAMPLE, tmp_path)
    entries = (site / "atma_fade-1.0.dist-info" / "entry_points.txt").read_text()
    assert "fade = atma_fade.mixer:Fade" in entries
    assert (site / "atma_fade" / "probe.py").is_file()


EVERY_GRID = """
name: every
extends: tiny
axes: {attn_type: [copies], reg_mode: [centred]}
set:
  model: {d_model: 16, n_layers: 3, n_heads: 2, n_kv_heads: 1, head_dim: 8, memory: means, positions: sines}
  data: {corpus: multiples, heldout_tokens: 400}
  train: {tokens: 512, seq_len: 32, batch_tokens: 128, micro_batch: 2}
  eval: {probes: [val, sizes], lengths: [32], documents: 2, validation_tokens: 256}
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_package_adds_every_kind_of_part(tmp_path: Path) -> None:
    """Each of the nine groups is loaded from a package that pip installed; broken, it stops its users alone."""
    bench = Bench(tmp_path)
    site = pip_install(EVERY, tmp_path)
    bench.env["PYTHONPATH"] = str(site)
    (tmp_path / "every.yaml").write_text(EVERY_GRID)
    launch, table, figure = (
        ("launch", "every.yaml", "--executor", "alone"),
        ("report", "--table", "size-list", "--format", "csv"),
        ("report", "--figure", "size-plot", "--out", "sizes.svg"),
    )
    code, out = run(bench, *launch)
    assert code == 0, out
    ((config,),) = bench.sql("SELECT config FROM cell")
    parts = ("mixers.copies", "memories.means", "positions.sines", "regularizers.centred", "corpora.multiples", "probes.sizes")  # fmt: skip
    plugins = json.loads(config)["plugins"]
    assert {plugin["path"] for plugin in plugins} == {f"package:atma-every==1.2:{part}" for part in parts}
    ((count,),) = bench.sql("SELECT value FROM results WHERE probe = 'sizes'")
    assert run(bench, *table) == (0, f"Type,Parameters\ncopies,{count:.0f}\n")
    assert run(bench, *figure)[0] == 0
    assert (tmp_path / "sizes.svg").is_file()
    (digest,) = {plugin["sha256"] for plugin in plugins}
    for command in (("show", "copies"), ("report", "--table", "provenance", "--format", "md")):
        _, out = run(bench, *command)
        named = out.partition(f"atma-every 1.2 (SHA-256 {digest[:12]}): ")[2].splitlines()[0]
        assert set(named.rstrip(".").split(", ")) == set(parts), command
    for module, command in (("alone.py", launch), ("reports.py", table), ("size_plot.py", figure)):
        (site / "atma_every" / module).write_text("raise RuntimeError('no luck')\n")
        code, out = run(bench, *command)
        assert code == 2, out
        assert "Traceback" not in out
        assert (
            out.strip()
            .splitlines()[-1]
            .endswith(
                "of the installed package atma_every cannot be loaded: RuntimeError: no luck; upgrade or uninstall that package"
            )
        )
    _fail_at_run_time(bench, site)
    assert run(bench, "launch", "micro.yaml", "--executor", "local", "--dry-run")[0] == 0
    assert run(bench, "report", "--table", "6")[0] == 0
    assert run(bench, "report", "--list")[0] == 0


def _fail_at_run_time(bench: Bench, site: Path) -> None:
    """Check the lines and exit codes of tables, figures and executors that load and then raise."""
    package = site / "atma_every"
    line = "of the installed package atma_every failed: ZeroDivisionError: no luck ({}:{}); upgrade or uninstall that package"
    table, drawing, executor = (package / f"{module}.py" for module in ("reports", "size_plot", "alone"))
    table.write_text("def size_list(store, data):\n    raise ZeroDivisionError('no\\nluck')\n")
    drawing.write_text(
        "from atma_sweep.reports.figures.canvas.base import collected\nimport pandas as pd\n\n\n"
        "def collect(store, data):\n    frame = pd.DataFrame([{'a': 1}])\n"
        "    return collected(store, data, 'size-plot', 'Sizes', frame, [])\n\n\n"
        "def draw(data, look):\n    raise ZeroDivisionError('no luck')\n"
    )
    executor.write_text(
        "class AloneExecutor:\n    @classmethod\n    def open(cls, context):\n        raise ZeroDivisionError('no luck')\n"
    )
    failures = {
        "tables 'size-list'": (table, 2, ("report", "--table", "size-list")),
        "figures 'size-plot'": (drawing, 11, ("report", "--figure", "size-plot", "--out", "sizes.svg")),
        "executors 'alone'": (
            executor,
            4,
            ("launch", "every.yaml", "--executor", "alone", "--set", "train.tokens=256", "--name", "x"),
        ),
    }
    for part, (file, number, command) in failures.items():
        code, out = run(bench, *command)
        assert code == 2, out
        assert out.splitlines()[-1] == f"atma-sweep: {part} {line.format(file, number)}"
        assert "Traceback" not in out
    code, out = run(bench, "report", "--all", "--sweep", "every", "--out", "all", "--format", "csv")
    assert code == 1, out
    for key, part in (("size-list", "tables 'size-list'"), ("figure size-plot", "figures 'size-plot'")):
        file, number, _ = failures[part]
        assert f"skipped {key}: {part} {line.format(file, number)}\n" in out
    assert "Traceback" not in out
    names = {path.name for path in (bench.folder / "all").iterdir()}
    assert {"table-6.csv", "index.html"} <= names
    assert "skipped figure timeline: sweep every has" in out, "the others are asked"
    log = (bench.folder / "all" / "failures.log").read_text()
    assert log.count("ZeroDivisionError: no") == 2 + 2  # each with the error that names the part
    assert f'File "{table}", line 2, in size_list' in log
