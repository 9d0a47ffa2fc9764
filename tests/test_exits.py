"""Hostile text in the database and passwords in addresses, at every exit of the command line."""

from __future__ import annotations

import csv
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from atma_sweep.reports.figures import FIGURES, make_figure
from atma_sweep.reports.figures.files import rendered
from atma_sweep.results.errors import StoreError
from atma_sweep.results.maintenance.backup import dump_command
from atma_sweep.results.store.database import redacted_url, resolve_url
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import AXES, CellRecord, CurvePoint, Measurement, Owner, Provenance
from atma_sweep.results.store.store import Store, open_store
from tiers import every_nth

EVIL = "\x1b[31m\x1b]0;owned\x07\x9b2J\u202eevil\u2066\x00\x08\n  fake line\r$x$ $\\frac{"
STEERING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
MEMORIES = (("on", "on"), ("off", "on"), ("=1+1EVIL", "off"), ("@x", "off"), ("on", "off"), ("off", "off"))
Run = Callable[..., tuple[int, str, str]]


def steering(text: str) -> list[str]:
    return [sign for sign in text if sign not in "\n\t" and unicodedata.category(sign) in STEERING]


def hostile(path: Path) -> Store:
    store = open_store(path / "atma.db", create=True)
    evil = EVIL.replace("\x00", "")
    owner = Owner(name=evil, host=evil, pid=1, started=0.0)
    levels = dict(zip(AXES, (evil, "baseline", evil, "on", "off"), strict=True))
    cells = [
        CellRecord(
            id=f"{i:012x}", slug=f"slug-{i}{evil}", seed=0, levels=levels | {"memory": memory.replace("EVIL", evil), "window": window},
            config={"model": {evil: evil}, "train": {"seq_len": 64}}, axes={"note": evil}, tokens=10,
        )
        for i, (memory, window) in enumerate(MEMORIES)
    ]  # fmt: skip
    options = {"requested": [["needle", 64]]}
    store.record_revision("wild", grid_text=evil, grid_file=evil, options=options, cells=cells)
    for index, cell in enumerate(cells):
        attempt = store.start_attempt(cell.id, owner=owner, fence=0, steps_total=10)
        recorder = DatabaseRecorder(store, attempt.id, 0)
        recorder.provenance(
            Provenance(config={}, seed=0, gpu_name=evil, git_commit=evil, host=evil, kernels={evil: evil})
        )
        recorder.curve(
            [CurvePoint(step=s, tokens=s, wall_s=float(s), train_loss=9.0 - s, tokens_per_s=5.0) for s in (1, 2)]
        )
        names = [
            Measurement(probe=probe, metric=metric, length=length, value=0.5 + index, unit=evil, n=9)
            for probe, metric, length in (
                ("needle", "digit_accuracy", 64), ("clean", "nats", 64), ("junk", "nats", 64), ("val", "val_loss", 0),
                ("throughput", "mfu", 0), ("throughput", "tokens_per_s", 0),
            )
        ]  # fmt: skip
        recorder.measurements([*names, Measurement(probe="clean", metric="nats", length=128, reason=f"{evil}: {evil}")])
        cause = f"{evil} postgresql://me:geheim@host/db"
        store.finish_attempt(attempt.id, 0, "failed" if index == 3 else "done", cause=cause, traceback=cause)
    return store


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--watch", "--until-end"],
        ["show", "000000000003"],
        ["db", "check"],
        ["export", "--to", "csv"],
        ["report", "--table", "6"],
        ["report", "--table", "failures"],
        ["report", "--table", "failures", "--format", "json"],
        ["report", "--table", "provenance", "--format", "md"],
        ["report", "--table", "6", "--format", "tex"],
        ["report", "--table", "6", "--format", "html"],
        ["report", "--table", "6", "--format", "csv"],
    ],
    ids=" ".join,
)
def test_nothing_of_a_hostile_name_steers_the_terminal(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    hostile(tmp_path).close()
    code, out, err = run(*arguments)
    assert code in (0, 1), err
    assert len(out) > 20
    assert steering(out + err) == []
    assert "geheim" not in out + err
    # a newline in a name begins no line of its own, but in a quoted cell
    assert "csv" in arguments or not [line for line in (out + err).splitlines() if line.startswith("  fake line")]


def test_a_log_is_printed_without_what_steers(run: Run, tmp_path: Path) -> None:
    store = hostile(tmp_path)
    attempt = store.attempts(f"{0:012x}")[-1]
    log = store.runs / attempt.run_dir / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"\x1b[31mred\x1b[0m 1%\r2%\npostgresql://me:geheim@host/db \x9b\xff\x00end\n")
    store.close()
    for arguments in (["logs", f"{0:012x}"], ["logs", f"{0:012x}", "-f"]):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert out == "red 1%\n2%\npostgresql://me:***@host/db \ufffd\ufffd\ufffdend\n"
    (line, *_) = run("logs", f"{0:012x}", "--json")[1].splitlines()
    assert json.loads(line)["line"].startswith("\x1b[31mred")


def test_csv_of_hostile_names_is_complete(run: Run, tmp_path: Path) -> None:
    hostile(tmp_path).close()
    for arguments in (["export", "--to", "csv", "--out", "x.csv"], ["report", "--table", "6", "--out", "x.csv"]):
        assert run(*arguments)[0] == 0
        with Path("x.csv").open(newline="") as file:
            header, *rows = csv.reader(file, strict=True)
        assert {len(row) for row in rows} == {len(header)}
        assert pd.read_csv("x.csv").shape == (len(rows), len(header))
        assert steering(Path("x.csv").read_text()) == []
        column = header.index("memory" if "memory" in header else "Mem")
        assert {row[column][:5] for row in rows} == {"on", "off", "'=1+1", "'@x"}


OF_FURTHER_PROBES = ("position-nll", "passkey", "retention", "attention-map", "extrapolation", "memory-recall",
                     "downstream", "texts", "gate-dynamics", "evictable-keys", "recall-state")  # fmt: skip
OF_STUDIES = ("history", "importance", "slices", "contours", "parallel", "front")
NOT_OF_THESE = ("count-map", "state-norm", "power", "seeds", "items", "response", *OF_STUDIES, *OF_FURTHER_PROBES)
"""Figures that these cells have nothing for."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FIGURES if name not in NOT_OF_THESE])
def test_a_figure_of_hostile_names_is_xml(tmp_path: Path, name: str) -> None:
    store = hostile(tmp_path)
    content = rendered(make_figure(name, store), "svg")
    root = ElementTree.fromstring(content)
    assert steering(content.decode()) == []
    assert root.findtext("{http://www.w3.org/2000/svg}title")


SECRET = "Geheim7"
ADDRESSES = [
    f"postgresql://me:{SECRET}@host:port/db",
    f"postgresql://me:{SECRET}",
    f"postgresql://me:{SECRET}@w@127.0.0.1:9/db",
    f"postgresql://me:x@y/{SECRET}@127.0.0.1:9/db",
    f"postgresql://me:{SECRET}@127.0.0.1:9/db",
    f"postgresql://me@127.0.0.1:9/db?password={SECRET}",
    f"postgresql://me@127.0.0.1:9/db?p%61ssword={SECRET}",
    f"postgresql:///db?host=127.0.0.1&port=9&sslpassword={SECRET}",
    f"postgres//me:{SECRET}@127.0.0.1/db",
    f"me:{SECRET}@127.0.0.1/db",
    f"//me:{SECRET}@127.0.0.1/db",
    f"mysql://me:{SECRET}@127.0.0.1/db",
    f"://me:{SECRET}@127.0.0.1/db",
    f"postgresql://me:{SECRET}@[::1/db",
]


@pytest.mark.parametrize("address", every_nth(ADDRESSES, 3))
@pytest.mark.parametrize(
    "arguments", [["status"], ["db", "backup"], ["db", "upgrade"], ["launch", "quick", "--dry-run"]], ids=" ".join
)
def test_no_error_tells_the_password(run: Run, monkeypatch: Any, address: str, arguments: list[str]) -> None:
    for command in ([*arguments, "--db", address], arguments):
        monkeypatch.setenv("ATMA_DB", address)
        code, out, err = run(*command)
        assert SECRET not in out + err
        assert code in (0, 2, 3)
        assert len(err.splitlines()) <= 1


def test_what_is_shown_of_an_address(tmp_path: Path) -> None:
    url = resolve_url(f"postgresql://me:{SECRET}@host/db?password={SECRET}&sslmode=require&passfile=/p")
    assert redacted_url(url) == "postgresql+psycopg://me:***@host/db?passfile=%2Fp&password=***&sslmode=require"
    assert url.query["password"] == SECRET
    assert SECRET not in dump_command(url)
    assert "sslmode=require" in dump_command(url)
    odd = tmp_path / "a:b@c@d.db"
    assert resolve_url(f"sqlite:///{odd}").database == str(odd)
    odd.touch()
    assert resolve_url(odd).database == str(odd)
    with pytest.raises(StoreError, match="%40"):
        resolve_url("postgresql://me:x@y@host/db")


@pytest.mark.usefixtures("no_databases")
def test_the_traceback_of_a_bug_tells_no_password(monkeypatch: Any, capsys: Any) -> None:
    import sys

    from atma_sweep import cli

    def broken() -> None:
        raise RuntimeError(f"postgresql://me:{SECRET}@host/db\x1b[31m")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(RuntimeError) as raised:
        cli.main(broken)
    sys.excepthook(raised.type, raised.value, raised.tb)
    err = capsys.readouterr().err
    assert "RuntimeError: postgresql://me:***@host/db" in err
    assert "Traceback" in err
    assert "\x1b" not in err
