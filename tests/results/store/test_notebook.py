"""examples/frames.ipynb runs from top to bottom in a fresh process, and its numbers are those of the database."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from atma_sweep.results import paper
from histories import launch, run, view

NOTEBOOK = Path(__file__).parents[3] / "examples" / "frames.ipynb"
RUN = """
import json, sys
space = {}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
print(json.dumps({
    "sweep": space["sweep"].name,
    "cells": list(space["cells"]["cell"]),
    "by_memory": [[*index, value] for index, value in space["by_memory"].stack().dropna().items()],
    "by_length": [[*index, value] for index, value in space["by_length"].stack().dropna().items()],
    "effect": space["effect"][["count", "mean"]].tolist(),
    "by_step": space["by_step"].to_dict("list"),
    "wide": list(space["wide"].columns),
    "table": space["table"].frame.iloc[:, 0].tolist(),
    "curves": [[line.get_label(), list(map(int, line.get_xdata())), list(map(float, line.get_ydata()))] for line in space["axes"].lines],
}))
"""


def executed(folder, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "ATMA_DB"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        capture_output=True, text=True, cwd=folder, env={**inherited, "MPLBACKEND": "agg", **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def means(rows):
    """Return the mean value by key, from rows (key..., value) to sorted rows [key..., mean]."""
    groups = {}
    for *key, value in rows:
        groups.setdefault(tuple(key), []).append(value)
    return [[*key, pytest.approx(fmean(values), rel=1e-12)] for key, values in sorted(groups.items())]


@pytest.mark.thorough
def test_without_a_database_it_reads_the_published_numbers(tmp_path):
    cells = executed(tmp_path)
    printed = paper.rows("complete-v2")
    assert (cells["sweep"], len(cells["cells"])) == ("printed-v2", 120)
    assert cells["by_memory"] == means((row["attn_type"], row["memory"], float(row["val_loss"])) for row in printed)
    loss = {tuple(row[axis] for axis in paper.AXES): float(row["val_loss"]) for row in printed}
    gains = [value - loss[(*key[:3], "off", key[4])] for key, value in loss.items() if key[3] == "on"]
    assert cells["effect"] == [60, pytest.approx(fmean(gains))]
    assert sorted({row[2] for row in cells["by_length"]}) == list(paper.LENGTHS)
    accuracy = {}
    for mixer, memory, length, value in cells["by_length"]:
        accuracy.setdefault(f"{mixer}, memory {memory}", []).append((length, pytest.approx(100 * value)))
    drawn = {label: list(zip(x, y, strict=True)) for label, x, y in cells["curves"]}
    assert drawn.pop("chance level") == [(0, 10), (1, 10)]
    assert (drawn, len(drawn)) == (accuracy, 6)
    assert sorted(set(cells["table"])) == sorted({row["attn_type"] for row in printed})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("working_folder")
def test_with_a_database_it_reads_that(store, cells, tmp_path):
    launch(store, cells(4), 1)
    for index in range(3):
        run(store, cells(4)[index].id, 5 + index, value=index + 1 / 3)
    outputs = executed(tmp_path, ATMA_DB=str(store.path))
    rows = [row for row in map(json.loads, view(store)) if row["metric"] == "val_loss"]
    assert (outputs["sweep"], len(rows)) == ("quick", 3)
    assert outputs["by_memory"] == means((row["attn_type"], row["memory"], row["value"]) for row in rows)
    assert outputs["by_step"] == {cells(4)[i].slug: [pytest.approx((i + 1 / 3) / 7)] * 3 for i in range(3)}
    assert outputs["effect"][0] == 0  # the cells differ in more than memory
    assert outputs["by_length"] == []
    assert [label for label, _, _ in outputs["curves"]] == ["chance level"]
    assert outputs["wide"][-2:] == ["clean.nats@4096", "val.val_loss"]


def test_notebook_is_stored_without_outputs():
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert book["nbformat"] == 4
    assert len(code) == 10
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
