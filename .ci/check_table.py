"""Compares every number that `report --table 6` prints for the quick sweep with SQL, read independently with sqlite3."""

import csv
import io
import json
import sqlite3
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal

COLUMNS = [
    ("val", "val_loss", 0, 3, 1),
    ("clean", "nats", 128, 2, 1),
    ("clean", "nats", 1024, 2, 1),
    ("junk", "nats", 128, 2, 1),
    ("junk", "nats", 1024, 2, 1),
    ("needle", "digit_accuracy", 128, 1, 100),
    ("needle", "digit_accuracy", 1024, 1, 100),
    ("throughput", "mfu_paper", 0, 1, 100),
]
AXES = ("attn_type", "reg_mode", "distractor", "memory", "window")


def printed(value: float | None, decimals: int, scale: int) -> str:
    if value is None:
        return "n/a"
    step = Decimal(1).scaleb(-decimals)
    return str((Decimal(repr(value)) * scale).quantize(step, rounding=ROUND_HALF_UP))


database = sqlite3.connect(sys.argv[1])
cells = database.execute(
    f"SELECT DISTINCT cell, {', '.join(AXES)} FROM results WHERE sweep = 'quick' AND state = 'done'"
).fetchall()
expected = {}
for cell, *levels in cells:
    row = []
    for probe, metric, length, decimals, scale in COLUMNS:
        query = "SELECT value FROM results WHERE sweep='quick' AND cell=? AND probe=? AND metric=? AND length=?"
        ((value,),) = database.execute(query, (cell, probe, metric, length)).fetchall()
        row.append(printed(value, decimals, scale))
    expected[tuple(levels)] = row

command = ["atma-sweep", "report", "--table", "6", "--db", sys.argv[1], "--format"]
written = subprocess.run([*command, "csv"], capture_output=True, text=True, check=True).stdout
header, *rows = csv.reader(io.StringIO(written))
assert len(header) == 13, header
assert len(rows) == 12 == len(expected), (len(rows), len(expected))
for row in rows:
    assert row[5:] == expected[tuple(row[:5])], (row, expected[tuple(row[:5])])
terminal = subprocess.run([*command, "terminal"], capture_output=True, text=True, check=True).stdout
for row in rows:
    assert any(line.split() == row for line in terminal.splitlines()), row

((bigram,),) = database.execute("SELECT DISTINCT value FROM results WHERE sweep='quick' AND metric='bigram_entropy'")
losses = [value for (value,) in database.execute("SELECT value FROM results WHERE sweep='quick' AND metric='val_loss'")]
assert len(losses) == 12, losses
assert max(losses) < bigram, (max(losses), bigram)
print(json.dumps({"rows": len(rows), "values": 8 * len(rows), "worst val_loss": max(losses), "bigram entropy": bigram}))
