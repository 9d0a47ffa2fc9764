"""Record the product's behaviour, and compare it with what was recorded.

`python -m tests.testing.freeze --check` (or `--record`) from the root of the repository, `--only ids,reports` for some
sections, `--keep DIR` to write the full outputs, so that two commits can be compared with diff. Exit code 1: something differs.

Frozen are a SHA-256 and a byte count per output (frozen/<section>.json), except that `errors` keeps messages to be read and
`models` keeps numbers. Commands run in forked children through the command line, so that modules may move; the few product
modules that are imported stand in `_command_line` and `_network_modules` alone.

Sections:
    ids: Cells of every shipped grid. No corpus is prepared, so ids of grids with data are provisional, but fixed.
    reports: Every file of `report --all` for published and shipped sweeps and for the prepared database.
    json: Output of reading commands, as text and as JSON, on the prepared database; help, reference and schema.
    models: Parameters, FLOPs, losses, gradients and greedy decoding of every part and base, in float64.
    errors: Messages of faulty grids. frozen/bad_grids.json is both the list of grids and the messages.
    imports: Heavy modules that reading commands import.
    startup: Start-up times, printed and never judged.

frozen/database.tar.gz is the prepared database: eight tiny networks that were trained once, as SQL, with their corpus, logs and
the weights of one cell. It is an input and is never written again.

Masked: the working folder, the host's name, free disk space, the CPU's name, times of
preparation, places in the source, and ages ("3 days ago"). Everything else is compared byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).resolve().parent / "frozen"
WORKERS = min(4, os.cpu_count() or 1)
ENVIRONMENT = {
    "TZ": "UTC", "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "COLUMNS": "120", "LINES": "40", "TERM": "dumb", "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "RAY_DISABLE_IMPORT_WARNING": "1", "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
PUBLISHED = ("printed-v1", "printed-v2", "printed-v2-open-weight", "printed-tra", "printed-wall", "printed-atlas")
SHIPPED = ("replication-pilot", "replication-rates", "replication", "replication-longer", "replication-retrieval")
CELL, SECOND_CELL = "polar-baseline-d0-m1-w0-s0", "rope-baseline-d0-m0-w0-s1"
RELATIVE = 1e-5
"""Largest relative difference of a number of a model.

Weights and noise are drawn in float32, whose last bit depends on the CPU: 6e-8 each. The networks are small and well
conditioned; a factor of about 150 covers how such differences grow until the loss and the gradients.
"""


def _command_line() -> Any:
    """Return the command line's module: with `_network_modules` the only place that names modules of the product."""
    from atma_sweep import cli

    return cli


def _network_modules() -> SimpleNamespace:
    """Return what the section `models` needs of the product, under names of our own."""
    from atma_sweep.model import backbone, config, registry
    from atma_sweep.model.inference import generation
    from atma_sweep.sweep.grid import grid
    from atma_sweep.sweep.training import flops

    return SimpleNamespace(
        Auxiliary=backbone.AuxiliaryTerms, build=backbone.build, ModelConfig=config.ModelConfig, write=generation.generate_tokens,
        MEMORIES=registry.MEMORIES, MIXERS=registry.MIXERS, POSITIONS=registry.POSITIONS, REGULARIZERS=registry.REGULARIZERS,
        load_grid=grid.load_grid, shipped=grid.shipped, forward_flops=flops.forward_flops, paper_flops=flops.paper_flops,
        training_flops=flops.training_flops,
    )  # fmt: skip


class Call(NamedTuple):
    """A command to run, in a folder of its own or in a shared one."""

    name: str
    arguments: tuple[str, ...]
    folder: Path


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def text(self) -> bytes:
        """Return all of it in one piece."""
        return f"exit {self.code}\n--- stdout\n{self.out}--- stderr\n{self.err}".encode()


def mask(text: str, *folders: Path) -> str:
    """Replace what differs between runs and machines but not between commits."""
    for folder in folders:
        text = text.replace(str(folder.resolve()), "<folder>").replace(str(folder), "<folder>")
    text = text.replace(str(ROOT), "<root>")
    if len(host := socket.gethostname()) > 1:
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "<host>", text)
    for pattern, replacement in (
        (r"\d+(\.\d+)? [KMGT]iB free", "<free> free"),
        (r'("free_bytes": |"free": |"disk_bytes_free": )\d+', r"\1<free>"),
        (r'("\w+_at": )"[^"]+"', r"\1<time>"),
        (r"(?:about |more than )?\d+ (seconds?|s|minutes?|min|hours?|h|days?|d|weeks?|months?) ago", "<age> ago"),
        (r'("\w*age_s"|"silent_s"): [\d.]+', r"\1: <age>"),
        (r"(?:the CPU of )[\w.-]+", "the CPU of <host>"),
        (r"<root>/\S+\.py:\d+: ", "<source>: "),
    ):
        text = re.sub(pattern, replacement, text)
    return text


def _child(call: Call, out: int, err: int) -> int:
    """Run a command in this (forked) process and return its exit code."""
    call.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(call.folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, encoding="utf-8", closefd=False) for n, mode in ((0, "r"), (1, "w"), (2, "w")))  # fmt: skip
    sys.argv = ["atma-sweep", *call.arguments]
    code: object = 0
    try:
        _command_line().main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def run_all(calls: Sequence[Call], limit_s: float = 400) -> dict[str, Result]:
    """Run commands in forked children, WORKERS at a time, and return their results by name, in order."""
    _command_line()
    results: dict[str, Result] = {}
    running: dict[int, tuple[Call, Any, Any, float]] = {}
    waiting = list(calls)
    while waiting or running:
        while waiting and len(running) < WORKERS:
            call = waiting.pop(0)
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                code = 71
                try:
                    code = _child(call, out.fileno(), err.fileno())
                finally:
                    os._exit(code)
            running[pid] = (call, out, err, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in running:
            for late, (_, _, _, start) in running.items():
                if time.monotonic() - start > limit_s:
                    print(f"took longer than {limit_s:.0f} s: {running[late][0].name}", flush=True)
                    os.kill(late, signal.SIGKILL)
            time.sleep(0.01)
            continue
        call, out, err, _ = running.pop(pid)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
            stream.close()
        results[call.name] = Result(os.waitstatus_to_exitcode(status), *texts)
    return {call.name: results[call.name] for call in calls}


def _preload() -> None:
    """Import heavy packages of others once, before commands are forked."""
    for module in ("matplotlib.pyplot", "numpy", "pandas", "scipy.stats", "sqlalchemy.orm"):
        importlib.import_module(module)


def _warm(call: Call) -> None:
    """Run a command in this process, so that forked ones find its modules imported."""
    saved, streams, folder = (os.dup(0), os.dup(1), os.dup(2)), (sys.stdin, sys.stdout, sys.stderr), Path.cwd()
    with tempfile.TemporaryFile() as sink:
        try:
            _child(call, sink.fileno(), sink.fileno())
        finally:
            for number, copy in enumerate(saved):
                os.dup2(copy, number)
            sys.stdin, sys.stdout, sys.stderr = streams
            os.chdir(folder)


def unpack_database(folder: Path) -> Path:
    """Put the prepared database, its runs folder and its grid into a folder, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(FROZEN / "database.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    connection = sqlite3.connect(folder / "atma.db")
    connection.executescript((folder / "atma.sql").read_text())
    connection.close()
    (folder / "atma.sql").unlink()
    return folder


def grids() -> list[Path]:
    """Return the files of the shipped grids."""
    return sorted((ROOT / "grids").glob("*.yaml"))


def ids(folder: Path) -> dict[str, bytes]:
    """Return, for every shipped grid, a line per cell: id, slug and axes."""
    calls = [
        Call(path.stem, ("launch", str(path), "--dry-run", "--json", "--cells", "100000"), folder / path.stem)
        for path in grids()
    ]
    ids_by_grid = {}
    for name, result in run_all(calls).items():
        if result.code:
            ids_by_grid[name] = mask(result.text().decode(), folder).encode()
            continue
        shown = json.loads(result.out)
        lines = [json.dumps(cell, sort_keys=True) for cell in shown["cells"]]
        ids_by_grid[name] = "\n".join([f"{shown['sweep']}: {len(lines)} cells", *lines, ""]).encode()
    return ids_by_grid


def reports(folder: Path) -> dict[str, bytes]:
    """Return every file that `report --all` writes, and what it prints, for all known sweeps and the prepared one."""
    _preload()
    own = unpack_database(folder / "own")
    bundles = (SHIPPED[2], *PUBLISHED, *SHIPPED[:2], *SHIPPED[3:])
    calls = [Call(sweep, ("report", "--all", "--sweep", sweep, "--out", "out"), folder / sweep) for sweep in bundles]
    calls.append(Call("own", ("report", "--all", "--sweep", "frozen", "--out", "out"), own))
    files = {}
    for name, result in run_all(calls).items():
        files[f"{name}/printed"] = mask(result.text().decode(), folder / name).encode()
        out_folder = folder / name / "out"
        for path in sorted(out_folder.rglob("*")):
            if path.is_file():
                files[f"{name}/{path.relative_to(out_folder)}"] = path.read_bytes()
    checks = [Call(f"check {sweep}", ("report", "--sweep", sweep, "--check", "out"), folder / sweep) for sweep in ("printed-v1", SHIPPED[0])]  # fmt: skip
    for name, result in run_all(checks).items():
        files[name] = mask(result.text().decode(), folder).encode()
    return files


def _leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from _leaves(command, (*path, name))


def reading_commands(tables: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the arguments of commands that only read, on the prepared database."""
    plain: list[tuple[str, ...]] = [
        ("status",), ("status", "--sweep", "frozen"), ("status", "--sweep", "printed-v2"), ("sweeps",),
        ("show", CELL), ("show", SECOND_CELL), ("show", "polar-baseline-d0-m0"), ("show", "nothing"),
        ("show", "nope-baseline-d0-m1-w0-s0", "--sweep", "printed-v2"),
        ("logs", CELL), ("logs", SECOND_CELL, "--lines", "3"), ("logs", SECOND_CELL, "--attempt", "2"),
        ("db", "check", "--skip-weights"), ("data", "list"), ("data", "list", "--known"), ("data", "verify"),
        ("prune-checkpoints", "--dry-run"), ("gc", "--dry-run"), ("delete", "frozen", "--dry-run"),
        ("delete", CELL, "--probe", "val", "--dry-run"),
        ("generate", CELL, "--prompt", "the river", "--tokens", "24", "--temperature", "0", "--device", "cpu"),
        ("launch", "frozen.yaml", "--dry-run"), ("launch", "frozen.yaml", "--dry-run", "--set", "train.muon_lr=0.03", "--name", "next"),
        ("plan", "frozen.yaml", "--gpus", "2", "--gpu", "H200", "--rate", "2.50/h", "--list"),
        ("plan", "full", "--gpus", "8", "--gpu", "H200", "--rate", "2.50/h"), ("plan", "search-mini", "--gpus", "1", "--gpu", "H100"),
        ("plan", "replication", "--gpus", "1", "--gpu", "H200", "--only", "memory=on"),
        ("report", "--list"), ("report", "--compare", "printed-v2"), ("report", "--table", "6", "--seeds"),
        ("report", "--table", "effects", "--all-rows"), ("report", "--table", "6", "--only", "memory=on", "--length", "all"),
        ("report", "--table", "6", "--compare", "printed-v2"), ("report", "--table", "nothing"), ("retry", "frozen"),
        ("pause", "frozen"), ("resume", "frozen"), ("cancel", "frozen"), ("nothing",),
    ]  # fmt: skip
    plain += [("report", "--table", table, "--sweep", sweep) for table in tables for sweep in ("frozen", "printed-v2")]
    return plain + [(*arguments, "--json") for arguments in plain if arguments[0] not in ("nothing",)]


def outputs(folder: Path) -> dict[str, bytes]:
    """Return what reading commands print, and help, reference and schema."""
    _preload()
    import typer

    own = unpack_database(folder / "own")
    tables = json.loads((FROZEN / "names.json").read_text())["tables"]
    calls = [Call(" ".join(arguments), arguments, own) for arguments in reading_commands(tables)]
    calls += [
        Call(" ".join((*path, "--help")), (*path, "--help"), own)
        for path in _leaves(typer.main.get_command(_command_line().app))
    ]
    calls += [Call(name, (name,), own) for name in ("reference", "schema")]
    exports = [("bundle", ()), *((form, ("--to", form)) for form in ("csv", "jsonl"))]
    calls += [Call(f"export {name}", ("export", "--sweep", "frozen", *more, "--out", f"exported.{name}"), own) for name, more in exports]  # fmt: skip
    texts = {name: mask(result.text().decode(), folder / "own").encode() for name, result in run_all(calls).items()}
    for form in ("csv", "jsonl"):
        texts |= {f"exported.{form}/{path.name}": path.read_bytes() for path in _files(own / f"exported.{form}")}
    return texts


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(child for child in path.rglob("*") if child.is_file())


def errors(folder: Path) -> dict[str, Any]:
    """Return the message of every faulty grid of frozen/bad_grids.json, beside its text."""
    corpus = json.loads((FROZEN / "bad_grids.json").read_text())
    shared = corpus["shared"]
    calls = []
    for number, (name, case) in enumerate(corpus["cases"].items()):
        case_folder = folder / f"{number:03d}"
        for file, text in case["files"].items():
            target = case_folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((shared[text[1:]] if text[:1] == "@" and text[1:] in shared else text).encode("latin1"))
        calls.append(Call(name, ("plan", *case["arguments"]), case_folder))
    _warm(Call("quick", ("plan", "quick"), folder / "warm"))
    results = run_all(calls, limit_s=120)
    cases = {}
    for call in calls:
        result = results[call.name]
        message = mask(result.err, call.folder).strip() if result.code else "(accepted)"
        cases[call.name] = corpus["cases"][call.name] | {"exit": result.code, "message": message}
    return {"shared": shared, "cases": cases}


def _noise(name: str, shape: Sequence[int]) -> Any:
    """Return numbers in (-0.5, 0.5) that depend on a parameter's name alone, the same on every machine."""
    import numpy
    import torch

    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return torch.from_numpy(numpy.random.Generator(numpy.random.PCG64(seed)).random(tuple(shape)) - 0.5)


SMALL: dict[str, Any] = {
    "d_model": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "vocab_size": 29, "window_size": 5
}  # fmt: skip


def networks(product: SimpleNamespace) -> dict[str, tuple[dict[str, Any], str, bool]]:
    """Return (model settings, regularizer, with distractor) of the networks to measure, by name."""
    configs: dict[str, tuple[dict[str, Any], str, bool]] = {}
    for mixer in product.MIXERS:
        for memory in ("none", *product.MEMORIES):
            configs[f"{mixer}+{memory}"] = ({"attn_type": mixer, "memory": memory}, "baseline", False)
        configs[f"{mixer}+window"] = ({"attn_type": mixer, "window": True}, "baseline", False)
    for scheme in product.POSITIONS:
        configs[f"positions-{scheme}"] = ({"attn_type": "nope", "positions": scheme}, "baseline", False)
    for regularizer in product.REGULARIZERS:
        configs[f"regularizer-{regularizer}"] = ({"attn_type": "polar", "memory": "gated_delta"}, regularizer, False)
    configs["distractor"] = ({"attn_type": "polar", "memory": "gated_delta"}, "weak", True)
    for name, settings in {
        "swiglu": {"mlp": "swiglu"}, "no-canon": {"canon": False}, "no-qk-norm": {"qk_norm": False}, "no-bias": {"bias": False},
        "no-gate": {"output_gate": False}, "normed": {"residual": "normed"}, "dropout": {"dropout": 0.25}, "no-cap": {"logit_cap": "none"},
        "tied": {"tie_head": True}, "llama": {"init": "llama"},
    }.items():  # fmt: skip
        configs[f"switch-{name}"] = ({"attn_type": "rope", "memory": "gated_delta"} | settings, "baseline", False)
    return configs


def base_networks(product: SimpleNamespace, folder: Path) -> dict[str, Any]:
    """Return the model's config, at its full size, of a cell of every base."""
    numbers = {}
    for base in product.shipped("base"):
        path = folder / f"of-{base}.yaml"
        path.write_text(f"name: frozen\nextends: {base}\n")
        config = product.load_grid(path).expand(lambda data: "f" * 64, lambda name: None)[0].config
        numbers[base] = (config.model, config.train)
    return numbers


def measure_network(
    product: SimpleNamespace, settings: dict[str, Any], regularizer: str, distractor: bool
) -> dict[str, Any]:
    """Return shapes (as a hash) and numbers of one network in float64."""
    import torch

    config = product.ModelConfig(**(SMALL | settings))
    model = product.build(config, seed=3, dtype=torch.float64)
    state = [[name, list(value.shape), str(value.dtype)] for name, value in model.state_dict().items()]
    initial = sum(float(parameter.detach().double().pow(2).sum()) for parameter in model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.2 * _noise(name, parameter.shape).to(parameter.dtype))
    tokens = torch.tensor([[(7 * i * i + 3 * i + 11 * row) % 29 for i in range(25)] for row in range(2)])
    terms = product.Auxiliary(regularizer, 5, distractor, None, seed=0, step=2, micro=1)
    features = model.features(tokens[:, :-1], auxiliary=terms)
    loss = model.total_loss(features.hidden_BTD, tokens[:, 1:]) / tokens[:, 1:].numel()
    auxiliary = {"regularizer": features.regularizer, "distractor": features.distractor}
    total = loss + sum(value for value in auxiliary.values() if value is not None)
    total.backward()
    gradients = {
        name: None if parameter.grad is None else float(parameter.grad.double().norm())
        for name, parameter in model.named_parameters()
    }
    model.eval()
    with torch.no_grad():
        logits = model.logits(model.features(tokens[:1, :-1], chunk=6).hidden_BTD).double()
    weights = _noise("weights of logits", logits.shape)
    written = list(product.write(model, tokens[0, :7], tokens=8, temperature=0.0))
    sampled = list(product.write(model, tokens[1, :7], tokens=8, temperature=1.5, top_p=0.9, seed=4))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    exact = {
        "parameters": parameters, "state": hashlib.sha256(json.dumps(state).encode()).hexdigest(), "decoded": written, "sampled": sampled,
        "flops": [product.forward_flops(config, 24), product.training_flops(config, 24), product.paper_flops(config, parameters, 24)],
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "initial": initial, "loss": float(loss), **{name: None if value is None else float(value) for name, value in auxiliary.items()},
        "logits": float(logits.norm()), "logits_weighted": float((logits * weights).sum()), "logits_first": logits.flatten()[:3].tolist(),
    }  # fmt: skip
    norm = sum(value**2 for value in gradients.values() if value is not None) ** 0.5
    return {"exact": exact, "numbers": numbers, "gradient": norm, "gradients": list(gradients.values())}


def models(folder: Path) -> dict[str, Any]:
    """Return the measurements of all networks, and the names of the registered parts."""
    import torch

    torch.set_num_threads(1)
    product = _network_modules()
    numbers: dict[str, Any] = {
        "names": {
            kind: list(getattr(product, kind)) for kind in ("MIXERS", "MEMORIES", "POSITIONS", "REGULARIZERS")
        } | {"bases": product.shipped("base"), "grids": product.shipped()}
    }  # fmt: skip
    for name, (settings, regularizer, distractor) in networks(product).items():
        numbers[name] = _attempt(lambda s=settings, r=regularizer, d=distractor: measure_network(product, s, r, d))
    for base, (config, train) in base_networks(product, folder).items():
        small = {name: value for name, value in SMALL.items() if name != "n_layers"} | {"n_layers": 4}
        settings = config.model_dump() | small
        measured = _attempt(lambda s=settings, t=train: measure_network(product, s, t.regularizer, t.distractor))
        flops = [product.forward_flops(config, train.seq_len), product.training_flops(config, train.seq_len)]
        numbers[f"base-{base}"] = measured | {"flops": flops, "config": config.model_dump(mode="json")}
    return json.loads(json.dumps(numbers))


def _attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a measurement, or the error that it raises, which is behaviour as well."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def differences(frozen: Any, now: Any, path: str = "", scale: float = 0.0) -> Iterator[str]:
    """Yield a line per difference of two nested values; floats may differ by RELATIVE of themselves or of `scale`."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        inner = frozen["gradient"] if isinstance(frozen.get("gradient"), float) else scale
        for key in [*frozen, *(key for key in now if key not in frozen)]:
            if key not in now or key not in frozen:
                yield f"{path}/{key}: {'lost' if key in frozen else 'new'}"
            else:
                yield from differences(frozen[key], now[key], f"{path}/{key}", inner if key == "gradients" else scale)
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for index, pair in enumerate(zip(frozen, now, strict=True)):
            yield from differences(*pair, f"{path}/{index}", scale)
    elif isinstance(frozen, float) and isinstance(now, float):
        if not abs(frozen - now) <= RELATIVE * max(abs(frozen), scale, 1e-3) and not (frozen != frozen and now != now):
            yield f"{path}: {frozen!r} -> {now!r}"
    elif frozen != now:
        yield f"{path}: {str(frozen)[:1000]} -> {str(now)[:1000]}"


IMPORTED = """
import json, sys
from atma_sweep import cli
sys.argv = ["atma-sweep", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    code = end.code
finally:
    print("\\n" + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
HEAVY = ("torch", "ray", "triton")


def imports(folder: Path) -> dict[str, bytes]:
    """Return which of HEAVY each reading command imports: none."""
    own = unpack_database(folder / "own")
    modules = {}
    for arguments in (
        ("status",), ("sweeps",), ("show", CELL), ("report", "--table", "6"), ("report", "--table", "effects"),
        ("report", "--figure", "loss", "--out", "loss.svg"), ("report", "--dashboard", "page.html"), ("export", "--to", "csv", "--out", "x.csv"),
        ("report", "--compare", "printed-v2"), ("data", "list"), ("logs", CELL), ("--help",),
    ):  # fmt: skip
        done = subprocess.run([sys.executable, "-c", IMPORTED, *arguments], cwd=own, capture_output=True, text=True)
        try:
            heavy = sorted(set(json.loads(done.stdout.splitlines()[-1])) & set(HEAVY))
        except (IndexError, ValueError):
            heavy = [f"failed: {done.stderr[-500:]}"]
        modules[" ".join(arguments)] = json.dumps(heavy).encode()
    return modules


PLAN_GRID = """\
name: frozen-plan
extends: tiny
axes:
  attn_type: [polar, nope, rope, alibi, fox, wall]
  memory: [off, gated_delta, deltanet, kda, omega]
  window: [off, on]
  model.mlp: [relu2, swiglu]
  train.clip: [1, 2, 3, 4, 5, 6, 7]
seeds: 12
"""
"""120 architectures, 10,080 cells."""


def startup(folder: Path) -> dict[str, Any]:
    """Print and return CPU and wall seconds (median of five) and module counts of commands, with the CPU's name."""
    own = unpack_database(folder / "own")
    (own / "plan.yaml").write_text(PLAN_GRID)
    cpu = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    )
    times: dict[str, Any] = {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(), "commands": {}}
    print(f"start-up on {times['cpu']}, {times['cores']} cores: CPU s, wall s, modules")
    for arguments in (
        ("--version",), ("status",), ("show", CELL), ("report", "--table", "6"), ("plan", "frozen.yaml"),
        ("launch", "full", "--dry-run"), ("plan", "plan.yaml", "--cells", "20000"),
    ):  # fmt: skip
        cpu_s, wall_s = [], []
        for _ in range(5):
            start = time.monotonic()
            child = subprocess.Popen([sys.executable, "-m", "atma_sweep", *arguments], cwd=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            _, _, usage = os.wait4(child.pid, 0)
            child.returncode = 0
            wall_s.append(time.monotonic() - start)
            cpu_s.append(usage.ru_utime + usage.ru_stime)
        code = IMPORTED.replace("sorted({name.split('.')[0] for name in sys.modules})", "sorted(sys.modules)")
        code = re.sub(r"sorted\(\{.*\}\)", "len(sys.modules)", code)
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=own, capture_output=True, text=True)
        row = {"cpu_s": round(statistics.median(cpu_s), 3), "wall_s": round(statistics.median(wall_s), 3), "modules": int(done.stdout.splitlines()[-1])}  # fmt: skip
        times["commands"][" ".join(arguments)] = row
        print(f"  {row['cpu_s']:7.3f} {row['wall_s']:7.3f} {row['modules']:6d}  {' '.join(arguments)}", flush=True)
    return times


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ids": ids, "errors": errors, "json": outputs, "imports": imports, "models": models, "reports": reports, "startup": startup
}  # fmt: skip
FILES = {"errors": "bad_grids.json"}


def frozen_form(values: dict[str, Any]) -> dict[str, Any]:
    """Return a section's values as they are stored: outputs as their hash and size, everything else as it is."""
    return {
        name: [hashlib.sha256(value).hexdigest(), len(value)] if isinstance(value, bytes) else value
        for name, value in values.items()
    }


def _store(path: Path, values: dict[str, Any], *, readable: bool) -> None:
    if readable:
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    else:
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        path.write_text(f"{{\n{rows}\n}}\n")


def _keep(folder: Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        path = folder / re.sub(r"[^\w./+=-]", "_", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value if isinstance(value, bytes) else (json.dumps(value, indent=1) + "\n").encode())


def run_section(section: str, record: bool, keep: Path | None, workdir: Path) -> int:
    """Record or check one section in this process and return the number of differences."""
    start = time.monotonic()
    values = SECTIONS[section](workdir)
    path = FROZEN / FILES.get(section, f"{section}.json")
    if keep is not None:
        _keep(keep / section, values)
    now = frozen_form(values)
    took = f"{time.monotonic() - start:.0f} s"
    if record:
        _store(path, now, readable=section in ("errors", "startup"))
        print(f"{section}: recorded {len(now)} entries in {took}")
        return 0
    if section == "startup":
        recorded = json.loads(path.read_text())["commands"] if path.exists() else "no times"
        print(f"{section}: recorded were {recorded}")
        return 0
    lines = list(differences(json.loads(path.read_text()), now))
    for line in lines[:200]:
        print(f"{section}{line}")
    print(f"{section}: {len(lines)} differences, {len(now)} entries, {took}", flush=True)
    return len(lines)


def main() -> int:
    """Parse the options, run each section in a process of its own, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.freeze", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the frozen values")
    action.add_argument("--record", action="store_true", help="write the frozen values")
    parser.add_argument("--only", metavar="SECTION,..", default=",".join(SECTIONS), help="sections to run")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="folder to write the full outputs into")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    os.environ.update(ENVIRONMENT)
    for name in ("ATMA_DB", "FORCE_COLOR", "PYTHONWARNINGS"):
        os.environ.pop(name, None)
    origin = Path(_command_line().__file__).resolve().parent
    if origin != ROOT:
        parser.error(f"atma_sweep is imported from {origin}, not from {ROOT}")
    keep = options.keep.resolve() if options.keep else None
    failed = []
    for section in chosen:
        workdir = Path(tempfile.mkdtemp(prefix="freeze-")).resolve()
        try:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = min(1, run_section(section, options.record, keep, workdir))
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                failed.append(section)
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
    print(f"freeze: {'failed: ' + ', '.join(failed) if failed else 'nothing differs'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
