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
def test_installed_mixer_probe_and_table_work(bench: Bench) -> None:
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


@pytest.mark.thorough
def test_example_builds_with_pip(tmp_path: Path) -> None:
    """The folder is a package that setuptools accepts; its metadata have the entry points of pyproject.toml."""
    shutil.copytree(EXAMPLE, tmp_path / "package")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", tmp_path / "site", tmp_path / "package"], check=True, env=os.environ)
    entries = (tmp_path / "site" / "atma_fade-1.0.dist-info" / "entry_points.txt").read_text()
    assert "fade = atma_fade.mixer:Fade" in entries
    assert (tmp_path / "site" / "atma_fade" / "probe.py").is_file()
