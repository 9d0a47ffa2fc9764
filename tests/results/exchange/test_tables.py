"""Tables for other programs: the formats agree with each other and with SQL."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from atma_sweep.results.errors import StoreError, SweepUnknown
from atma_sweep.results.exchange import tables
from atma_sweep.results.exchange.tables import export_table
from histories import T, launch, run

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
class TestTables:
    @pytest.fixture
    def filled(self, store, cells):
        launch(store, cells(4), 1)
        launch(store, cells(3), 2, grid="newest")
        for index, minute in ((0, 5), (1, 6), (3, 7), (0, 8)):
            run(store, cells(4)[index].id, minute, value=index + 1 / 3)
        return store

    def test_table_formats_agree_with_sql(self, filled, tmp_path):
        for what, table in (
            ("cells", "cell"), ("attempts", "attempt"), ("measurements", "measurement"),
            ("curves", "curve_point"), ("examples", "example"),
        ):  # fmt: skip
            for fmt in ("csv", "jsonl", "parquet"):
                count = export_table(filled, what, tmp_path / f"{what}.{fmt}", fmt)
            lines = [json.loads(line) for line in (tmp_path / f"{what}.jsonl").read_text().splitlines()]
            csv = pd.read_csv(tmp_path / f"{what}.csv", dtype_backend="numpy_nullable", float_precision="round_trip")
            parquet = pd.read_parquet(tmp_path / f"{what}.parquet", dtype_backend="numpy_nullable")
            assert count == len(lines) == len(csv) == len(parquet) > 0
            assert list(csv.columns) == list(parquet.columns) == list(lines[0])
            assert set(T[table].columns.keys()) - {"id", "attempt_id"} <= set(csv.columns)
            for name in csv.columns:
                wanted = [line[name] for line in lines]
                structured = isinstance(wanted[0], dict) or name in ("detail", "deviation")
                for frame in (csv, parquet):
                    values = [None if pd.isna(value) else value for value in frame[name]]
                    if structured:
                        values = [None if value is None else json.loads(value) for value in values]
                    assert values == wanted, (what, name)
        losses = sorted(line["value"] for line in jsonl(tmp_path / "measurements.jsonl") if line["probe"] == "val")
        assert losses == [1 / 3, 1 / 3, 1 + 1 / 3]  # both attempts of the first cell; the dropped cell is left out

    def test_csv_has_a_single_header_line(self, filled, tmp_path, monkeypatch):
        monkeypatch.setattr(tables, "ROWS_PER_BATCH", 2)
        export_table(filled, "curves", tmp_path / "c.csv", "csv")
        text_ = (tmp_path / "c.csv").read_text()
        assert text_.startswith("attempt_id,cell_id,number,")
        assert text_.count("attempt_id") == 1
        assert text_.count("\n") == 10

    def test_an_empty_table_has_its_columns(self, store, cells, tmp_path):
        launch(store, cells(1))
        for fmt in ("csv", "jsonl", "parquet"):
            assert export_table(store, "measurements", tmp_path / f"m.{fmt}", fmt) == 0
        assert list(pd.read_parquet(tmp_path / "m.parquet").columns) == list(pd.read_csv(tmp_path / "m.csv").columns)

    def test_export_table_refuses_impossible_requests(self, filled, tmp_path, monkeypatch):
        with pytest.raises(StoreError, match="choose one of: csv, jsonl, parquet"):
            export_table(filled, "cells", tmp_path / "x", "xls")
        with pytest.raises(StoreError, match="choose one of: cells, measurements"):
            export_table(filled, "cell", tmp_path / "x", "csv")
        with pytest.raises(SweepUnknown):
            export_table(filled, "cells", tmp_path / "x", "csv", "nothing")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(StoreError, match=r"pip install 'atma-sweep\[parquet\]'"):
            export_table(filled, "cells", tmp_path / "x", "parquet")
        assert not [path for path in tmp_path.iterdir() if path.suffix != ".db" and "x" in path.name]


def jsonl(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]
