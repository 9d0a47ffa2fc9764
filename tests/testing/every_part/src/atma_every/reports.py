"""A table."""

from atma_sweep.reports.number_format import column_of
from atma_sweep.reports.table_builder import TableRow, measured_entry
from atma_sweep.reports.tables.task_tables import configurations_with_probe, task_table


def size_list(store, data):
    """Return the table `size-list`: one row per configuration that the probe sizes measured."""
    rows = configurations_with_probe(data, "sizes")
    column = column_of("sizes", data.metric("sizes", "count"))
    lines = [
        TableRow(labels=rows.labels(cells), entries=(measured_entry(data, cells, column),), cells=cells)
        for cells in rows.groups
    ]
    return task_table(store, rows, "size-list", "Number of parameters", lines, [])
