"""Imports run one way, and quick commands stay quick. Read from the syntax trees, without importing anything."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from layers import table
from patience import PATIENCE_S
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "kernels" / "shapes.py"
FOLDERS = tuple(table())
"""Folders of the root, and its files cli.py and api.py without their suffix."""


@cache
def sources() -> list[Path]:
    files: list[Path] = []
    for folder in FOLDERS:
        files += sorted((ROOT / folder).rglob("*.py")) or [ROOT / f"{folder}.py"]
    return files


def watched(*patterns: str) -> set[str]:
    """Paths of sources that match, each pattern at least one: a guard that watches no file fails."""
    names = [file.relative_to(ROOT).as_posix() for file in sources()]
    matches = {pattern: {name for name in names if re.fullmatch(pattern, name)} for pattern in patterns}
    empty = sorted(pattern for pattern, files in matches.items() if not files)
    assert not empty, f"no file matches {', '.join(empty)}: the guard watches nothing there; adjust it to what moved"
    return set().union(*matches.values())


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(file)))


@cache
def imports(file: Path) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """(line, absolute dotted name as parts) of every import; the package's own names start with atma_sweep."""
    targets: list[tuple[int, tuple[str, ...]]] = []
    package = ("atma_sweep", *file.relative_to(ROOT).parent.parts)
    for node in nodes(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                targets.append((node.lineno, tuple(alias.name.split("."))))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                targets.append((node.lineno, (*base, *module, alias.name)))
    return tuple(targets)


def folder_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.thorough
@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_down_the_layers(folder: str) -> None:
    wrong = []
    seen = 0
    for file in sources():
        if folder_of(file) != folder:
            continue
        for line, parts in imports(file):
            seen += 1
            own = parts[0] == "atma_sweep"
            target = parts[1] if own and len(parts) > 1 else None
            if target in FOLDERS and target != folder and target not in table()[folder].imports:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {'.'.join(parts)}")
            if not own and parts[0] in table()[folder].never:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {parts[0]}")
    assert wrong == []
    assert seen > 5


def module_path(parts: tuple[str, ...]) -> Path:
    """The file that an import of that dotted name of the package reads; a package itself is its __init__.py."""
    for end in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[1:end])
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return ROOT / "__init__.py"


@cache
def arrows() -> dict[str, set[str]]:
    """File -> the files that it imports, be it lazily, for its types alone or by the name in a list."""
    imported: dict[str, set[str]] = {}
    for file in sources():
        theirs = {module_path(parts) for _, parts in imports(file) if parts[0] == "atma_sweep"} - {file}
        theirs |= listed(file) if file.name == "__init__.py" else set()
        imported[file.relative_to(ROOT).as_posix()] = {target.relative_to(ROOT).as_posix() for target in theirs}
    return imported


def package_of(name: str) -> str:
    """The package of a file; a file directly in a folder of the root stands for itself."""
    folder, _, _ = name.rpartition("/")
    return folder if folder not in ("", *FOLDERS) else name


def between_packages() -> dict[str, set[str]]:
    imported: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        imported.setdefault(package_of(name), set()).update(
            {package_of(target) for target in targets} - {package_of(name)}
        )
    return imported


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle of a graph, each name imported by the next and the first repeated at the end; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def listed(file: Path) -> set[Path]:
    """The files that a list of tables or figures names, which are imported when one is made."""
    calls = [node for node in nodes(file) if isinstance(node, ast.Call)]
    specs = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "ReportSpec"]
    targets = [call.args[0].value for call in specs if isinstance(call.args[0], ast.Constant)]
    return {file.with_name(f"{str(target).partition(':')[0]}.py") for target in targets}


def test_circle_names_a_cycle_of_imports() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []
    graph = arrows()
    assert {"sweep/planning/admission.py", "sweep/planning/planner.py"} <= graph["sweep/orchestrator/launch.py"]
    assert "results/store/store.py" in graph["results/exchange/tables.py"], "an import for types counts"
    assert "sweep/commands/launch.py" in graph["sweep/commands/runs.py"], "an import inside a function counts"
    assert "reports/tables/complete.py" in graph["reports/tables/__init__.py"], "the name in a list counts"


def test_no_circle_of_imports_between_files() -> None:
    assert circle(arrows()) == []


def test_no_circle_of_imports_between_packages() -> None:
    assert circle(between_packages()) == []


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_packages_of_a_folder_stand_in_layers(folder: str) -> None:
    """Files directly in a folder are bound only where the table names them, and bind no package then."""
    height = table()[folder].height
    imported: dict[str, set[str]] = {}
    for name, targets in arrows().items():
        if name.startswith(f"{folder}/"):
            theirs = {target.split("/")[1] for target in targets if target.startswith(f"{folder}/")}
            imported.setdefault(name.split("/")[1], set()).update(theirs)
    packages = {name for name in imported if not name.endswith(".py")}
    assert set(table()[folder].packages) == packages, "tests/testing/layers.toml names other packages than there are"
    assert set(height) <= set(imported)
    wrong = [
        f"{folder}/{name} imports {folder}/{target}"
        for name in height
        for target in imported[name] & set(height) - {name}
        if height[target] >= height[name]
    ]
    assert wrong == []


def test_no_file_reaches_for_what_is_private_to_another() -> None:
    """But for one kernel that is written in several files."""
    uses, seen = [], 0
    exempt = watched(r"kernels/attention/(gluon/.+|\w+/gluon)\.py")
    for file in sources():
        if file.relative_to(ROOT).as_posix() in exempt:
            continue
        modules = set()
        for node in nodes(file):
            for alias in node.names if isinstance(node, ast.ImportFrom) and node.level else ():
                seen += 1
                modules.add(alias.asname or alias.name)
                if alias.name.startswith("_") and not alias.name.startswith("__"):
                    uses.append(f"{file.relative_to(ROOT)}:{node.lineno} {alias.name}")
        uses += [
            f"{file.relative_to(ROOT)}:{node.lineno} {node.value.id}.{node.attr}"
            for node in nodes(file)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
            if node.attr.startswith("_") and not node.attr.startswith("__")
        ]
    assert uses == []
    assert seen > 1000


def test_whatever_ends_a_command_with_a_code_is_expected() -> None:
    """The command line knows an error that a user can mend by its class; whoever only has an exit code is a bug to it."""
    classes = {node.name: node for file in sources() for node in nodes(file) if isinstance(node, ast.ClassDef)}

    def expected(name: str) -> bool:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)] if name in classes else []
        return name in ("UserError", "BaseException") or any(map(expected, bases))

    coded = [
        name
        for name, node in classes.items()
        for line in node.body
        if isinstance(line, ast.Assign) and [getattr(target, "id", "") for target in line.targets] == ["exit_code"]
    ]
    assert len(coded) > 4
    assert [name for name in coded if not expected(name)] == []


def test_only_the_scheduler_imports_ray() -> None:
    users = {file.relative_to(ROOT) for file in sources() for _, parts in imports(file) if parts[0] == "ray"}
    apart = {Path(name) for name in watched(r"sweep/orchestrator/detached\.py")}
    assert {user.parent for user in users - apart} == {Path("sweep/executors")}


def test_reports_ask_the_store_and_know_no_rows() -> None:
    names = ("schema", "queries", "attempt_queries", "database", "upgrading")
    inside = watched(*(rf"results/store/{name}\.py" for name in names))
    imported = {name: targets & inside for name, targets in arrows().items() if name.startswith("reports/")}
    assert {name: targets for name, targets in imported.items() if targets} == {}
    assert len(imported) > 20


WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "rename", "savefig", "unlink"}
WRITERS = {
    "results/console/output_files.py",  # the one writer
    "results/exchange/bundles.py",  # members of a bundle that is open
    "results/store/upgrading.py",  # copies of databases; removes one that could not be made
    "results/exchange/import_files.py",  # into the runs folder
    "results/exchange/trackers/tensorboard.py",  # into a folder of files.filling
    "results/exchange/trackers/wandb.py",  # removes links to W&B's logs from such a folder
    "results/console/streams.py",  # /dev/null in place of a closed stream
    "results/store/journal.py",
    "reports/figures/files.py",  # into memory
    "sweep/commands/launch.py",  # logs of trackers, into the runs folder
    "reports/report_request.py",  # removes the trace of an older file
    "reports/report_folder.py",  # removes the tracebacks of an older call
}


def test_output_files_are_written_by_output_files_alone() -> None:
    guarded = watched(r"cli\.py", r"reports/.+\.py", r"results/.+\.py", r"sweep/commands/.+\.py")
    writers = {name for name in guarded if any(map(_writes, nodes(ROOT / name)))}
    assert writers - WRITERS == set()
    assert WRITERS - writers == set(), "an exemption that nothing needs any more"


def _writes(node: ast.AST) -> bool:
    """Return whether a call writes: by its name, or `open` with a mode that does."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "rename" and (len(node.args) != 1 or node.keywords):
        return False  # of a data frame, or of a sweep; a path's takes its target alone
    modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    opens = name == "open" and any(set(mode) <= set("wxabt+") and set(mode) & set("wxa") for mode in modes)
    flags = {flag.attr for arg in node.args for flag in ast.walk(arg) if isinstance(flag, ast.Attribute)}
    return name in WRITES or opens or (name == "open" and bool(flags & {"O_WRONLY", "O_RDWR"}))


SUFFIX = re.compile(r"_?[a-z][A-Za-z0-9_]*_([A-Z]{1,6})")
"""Of a tensor's name: a letter an axis."""


@pytest.mark.parametrize("folder", ["model", "kernels"])
def test_shape_letter_has_a_single_meaning(folder: str) -> None:
    """The one that kernels/shapes.py gives; a file that explains letters of its suffixes gives them no other."""
    legend = dict(re.findall(r"^([A-Z]) (.+)$", ast.get_docstring(tree(SHAPES)) or "", re.MULTILINE))
    wrong = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        names = {getattr(node, "id", None) or getattr(node, "arg", None) or "" for node in nodes(file)}
        used = {letter for name in names if (suffix := SUFFIX.fullmatch(name)) for letter in suffix[1]}
        wrong += [
            f"{file.relative_to(ROOT)}: {letter} is not in {SHAPES.name}" for letter in sorted(used - legend.keys())
        ]
        meanings = dict(
            re.findall(
                r"\b([A-Z]) (?:model |head |KV |query )?(width|size|heads|taps|vocabulary)\b",
                ast.get_docstring(tree(file)) or "",
            )
        )
        wrong += [
            f"{file.relative_to(ROOT)}: {letter} {word}"
            for letter, word in meanings.items()
            if word not in legend[letter]
        ]
    assert wrong == []


def test_inside_the_package_imports_are_relative() -> None:
    assert [f for f in sources() for node in nodes(f) if _absolute(node)] == []


def _absolute(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").split(".")[0] == "atma_sweep"
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "atma_sweep" for alias in node.names)


def modules_after(*statements: str, cwd: Path) -> set[str]:
    code = "; ".join([*statements, "import json, sys", "print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.thorough
def test_status_and_show_load_neither_torch_nor_ray_nor_pandas(tmp_path: Path) -> None:
    make = "from atma_sweep.results.store.store import open_store; store = open_store('atma.db', create=True)"
    modules_after(make, cwd=tmp_path)
    calls = "from atma_sweep import cli; cli.app(['status'], standalone_mode=False)"
    loaded = modules_after(calls, "import atma_sweep.reports.tables", cwd=tmp_path)
    assert "sqlalchemy" in loaded
    assert loaded & {"torch", "ray", "pandas", "numpy", "alembic", "matplotlib", "fla"} == set()


@pytest.mark.thorough
def test_status_loads_neither_pydantic_nor_unused_dialects(tmp_path: Path) -> None:
    """Together a fifth of its time: typer converts options by pydantic, and one word of the schema can load a dialect."""
    make = "from atma_sweep.results.store.store import open_store; store = open_store('atma.db', create=True)"
    modules_after(make, cwd=tmp_path)
    calls = "from atma_sweep import cli; cli.app(['status', '--db', 'atma.db', '--json'], standalone_mode=False)"
    dialects = "import sys; assert 'sqlalchemy.dialects.postgresql' not in sys.modules"
    loaded = modules_after(calls, dialects, cwd=tmp_path)
    assert "sqlalchemy" in loaded
    assert loaded & {"pydantic", "numpy", "rich", "ruamel"} == set()


@pytest.mark.thorough
def test_reading_a_plain_grid_file_needs_no_ray(tmp_path: Path) -> None:
    loaded = modules_after(
        "from atma_sweep.sweep.orchestrator import launch",
        "from atma_sweep.sweep.grid.grid import load_grid",
        cwd=tmp_path,
    )
    assert loaded & {"ray", "pandas", "fla", "matplotlib"} == set()


@pytest.mark.thorough
def test_folders_of_the_root_shadow_nothing_that_fla_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fla"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


STEPS = """
import torch
from itertools import cycle
from atma_sweep.model.backbone import AuxiliaryTerms, build
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.registry import MEMORIES, MIXERS, REGULARIZERS
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.training.optimizers import Optimizers

size = dict(d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=29, window_size=3)
tokens = torch.arange(24).reshape(2, 12)
every = MIXERS, ("none", *MEMORIES), REGULARIZERS
count = max(map(len, every))
for _, attn_type, memory, regularizer in zip(range(count), *map(cycle, every)):
    model = build(ModelConfig(attn_type=attn_type, memory=memory, **size), seed=0)
    optimizers = Optimizers(model.parameter_groups(), TrainConfig(), torch.device("cpu"))
    terms = AuxiliaryTerms(regularizer, 5, False, None, seed=0, step=0, micro=0)
    model.total_loss(model.features(tokens[:, :-1], auxiliary=terms).hidden_BTD, tokens[:, 1:]).backward()
    optimizers.step(1.0)
    optimizers.load_state_dict(optimizers.state_dict())
import sys
print("torch._dynamo" in sys.modules)
import torch._dynamo
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.thorough
def test_training_on_the_cpu_does_not_load_the_compiler(tmp_path: Path) -> None:
    """It takes a second, which every attempt would pay; torch loads it at the first call of much that looks harmless."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.thorough
def test_a_dry_run_loads_torch_but_not_its_compiler(tmp_path: Path) -> None:
    """Sizes and FLOPs are those of the parts themselves; the compiler would take another second."""
    call = "from atma_sweep import cli; cli.app(['launch', 'full', '--dry-run'], standalone_mode=False)"
    compiler = "import sys; assert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    loaded = modules_after(call, compiler, cwd=tmp_path)
    assert loaded & {"sqlalchemy", "torch"} == {"sqlalchemy", "torch"}
    assert loaded & {"ray", "pandas"} == set()


def test_hooks_and_settings_name_files_that_exist() -> None:
    """A hook's pattern, a module in mypy's exceptions or a package in the wheel that matches nothing guards nothing."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("needs a checkout with .git: git clone")
    hooks = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")
    patterns = [hook["files"] for repository in hooks["repos"] for hook in repository["hooks"] if "files" in hook]
    assert patterns != []
    for pattern in patterns:
        for option in alternatives(pattern):
            assert any(re.search(option, name) for name in tracked), f".pre-commit-config.yaml: {option}"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ours = [
        name for rule in settings["tool"]["mypy"]["overrides"] for name in rule["module"] if name.startswith("atma_sweep.")
    ]  # fmt: skip
    assert ours != []
    paths = [re.escape(name.removeprefix("atma_sweep.").replace(".", "/")).replace(r"\*", ".+") for name in ours]
    watched(*(path + r"(/__init__)?\.py" for path in paths))
    for name in settings["tool"]["setuptools"]["packages"]:
        assert (ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").is_file(), name


def alternatives(pattern: str) -> list[str]:
    """The regular expressions that a pattern of the form ^(a|b(c|d)e|f) stands for, its groups written out."""
    group = re.search(r"\(([^()]*)\)", pattern)
    if group is None:
        return [pattern]
    return [
        expanded
        for word in group[1].split("|")
        for expanded in alternatives(pattern[: group.start()] + word + pattern[group.end() :])
    ]


def test_alternatives_write_out_groups() -> None:
    assert set(alternatives("^(a/(b|c)|d)")) == {"^a/b", "^a/c", "^d"}


def test_watched_fails_when_its_target_vanishes() -> None:
    with pytest.raises(AssertionError, match=r"no file matches sweep/gone\\.py"):
        watched(r"cli\.py", r"sweep/gone\.py")


LONG = {
    "kernels/attention/gluon/forward.py": "a kernel's body: its phases share registers and barriers",
    "kernels/attention/softmax/triton.py": "a kernel's body",
    "kernels/attention/wall/gluon.py": "a kernel's body",
    "kernels/gated_delta/triton.py": "a kernel's body",
    "kernels/key_gated_step/triton.py": "a kernel's body",
    "kernels/omega/triton.py": "a kernel's body",
    "results/migrations/versions/0001_baseline.py": "the tables of the first schema, one call each; never changed",
    "results/store/database.py": "an engine and the three hooks of its connections, which share its settings",
}
"""Files with a function of more than MOST_LINES lines without its docstring, and why it stays whole."""
MOST_LINES = 60
MOST_FILES = 14


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    first = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    docstring = 0 if first is None or first.end_lineno is None else first.end_lineno - first.lineno + 1
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1 - docstring


def test_long_functions_are_listed_with_a_reason() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long_functions = {
        file.relative_to(ROOT).as_posix()
        for file in sources()
        for node in nodes(file)
        if isinstance(node, functions) and lines_of(node) > MOST_LINES
    }
    assert long_functions == set(LONG)


def test_packages_have_few_files_and_an_introduction() -> None:
    """A package says what lies in it, what may import it and where to start reading."""
    packages = {file.parent for file in sources()} - {ROOT}
    wrong = []
    for package in sorted(packages):
        name = package.relative_to(ROOT).as_posix()
        if len(list(package.glob("*.py"))) > MOST_FILES:
            wrong.append(f"{name} has more than {MOST_FILES} files")
        text = ast.get_docstring(tree(package / "__init__.py")) or ""
        wrong += [
            f"{name}/__init__.py says nothing of {word}" for word in ("import", "start") if word not in text.lower()
        ]
    assert wrong == []


PRIVATE = {
    "tests/kernels/attention/test_polar.py": "block sizes of the planner, which no number shows",
    "tests/kernels/test_dispatch.py": "the reason for a machine that this is not",
    "tests/kernels/test_fp8.py": "the error of a self-test that passes, and one half of a fused gradient",
    "tests/kernels/test_omega_triton.py": "the error of a self-test that passes",
    "tests/kernels/test_self_tests.py": "the errors of self-tests that pass",
    "tests/kernels/test_small_ops.py": "losses of a token, of which the product returns the mean",
    "tests/reports/stats/test_needle_model.py": "a fit, which no table shows whole",
    "tests/sweep/planning/test_cost_estimate.py": "a plug-in probe that a later process has not loaded",
    "tests/test_api.py": "what a notebook calls to show an object",
    "tests/reports/dashboard/server/test_access_guard.py": "the database that a running server reads",
    "tests/reports/dashboard/server/test_page_cache.py": "the lock of a page that is being made",
    "tests/reports/dashboard/server/test_serve.py": "a failure between the address and the first page",
    "tests/sweep/executors/test_ray_local.py": "attempts that run, without Ray",
    "tests/sweep/grid/test_designs.py": "the smallest share that a fraction may be",
    "tests/reports/live/test_watch.py": "events as lines, without a terminal",
    "tests/reports/tables/test_published.py": "rows of the printed tables before they are joined",
    "tests/reports/test_large.py": "steps of a large table, each timed and compared by itself",
    "tests/reports/test_report_folder.py": "a folder that is half gathered",
    "tests/sweep/attempt/test_samples.py": "points that a curve keeps",
    "tests/testing/compiled.py": "kernels that compile for longest go first",
    "tests/testing/kernel_operations.py": "custom ops, which torch.library.opcheck takes",
}
"""Files of tests that use a private name of the product, and why no public path shows the same."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_uses(file: Path, theirs: frozenset[str]) -> set[str]:
    """Return the private names out of `theirs` that a test imports, or reads or sets on an object of the product."""
    names: set[str] = set()
    own = {node.name for node in nodes(file) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if (node.module or "").startswith("atma_sweep")}
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names.add(node.attr)
    return {name for name in names - own - DOCUMENTED if is_private(name)} & theirs


@pytest.mark.thorough
def test_private_names_are_used_by_listed_tests_alone() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    theirs = {node.name for file in sources() for node in nodes(file) if isinstance(node, functions)}
    theirs |= {node.attr for file in sources() for node in nodes(file) if isinstance(node, ast.Attribute)}
    theirs |= {node.id for file in sources() for node in nodes(file) if isinstance(node, ast.Name)}
    files = sorted((ROOT / "tests").rglob("*.py"))
    uses = {file.relative_to(ROOT).as_posix(): private_uses(file, frozenset(theirs)) for file in files}
    private_names = {name: sorted(names) for name, names in uses.items() if names}
    assert {name: names for name, names in private_names.items() if name not in PRIVATE} == {}
    assert PRIVATE.keys() - private_names.keys() == set(), "an exemption that nothing needs any more"


DOCUMENTED = {"_asdict", "_replace", "_fields", "_exit", "_mapping"}
"""Names that are part of a public interface in spite of their underscore (namedtuple, os, Row of SQLAlchemy)."""
FOREIGN = {
    "torch": {"_scaled_mm", "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_C",
              "_cuda_endAllocateToPool", "_foreach_copy_", "_foreach_lerp_", "_foreach_lerp", "_foreach_mul_", "_foreach_add_"},
    "ray": {"_raylet", "_private"},
    "optuna": {"_contains"},
}  # fmt: skip
"""Private names of other packages that the product uses; each package has an upper bound in pyproject.toml for them."""


def test_private_names_of_dependencies_have_an_upper_bound() -> None:
    defined, used = set(DOCUMENTED), set()
    for file in sources():
        for node in nodes(file):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute):
                (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        used |= {part for _, parts in imports(file) if parts[0] != "atma_sweep" for part in parts}
    listed_names = set().union(*FOREIGN.values())
    assert {name for name in used - defined if is_private(name)} - listed_names == set()
    assert listed_names - used == set(), "an exemption that nothing needs any more"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    bounds = {re.split(r"[\[<>=~!]", requirement)[0]: "<" in requirement for requirement in dependencies}
    assert all(bounds[name] for name in FOREIGN)
