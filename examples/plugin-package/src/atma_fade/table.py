"""A table: one row per configuration with its half-life."""

from atma_sweep.reports.number_format import column_of
from atma_sweep.reports.table_builder import TableRow, measured_entry
from atma_sweep.reports.tables.task_tables import configurations_with_probe, task_table


def half_lives(store, data):
    """Return the table `half-lives`: one row per configuration that was measured by the probe half_life."""
    rows = configurations_with_probe(data, "half_life")
    column = column_of("half_life", data.metric("half_life", "tokens"))
    lines = [
        TableRow(labels=rows.labels(cells), entries=(measured_entry(data, cells, column),), cells=cells)
        for cells in rows.groups
    ]
    return task_table(store, rows, "half-lives", "Half-life of the fading mean", lines, [])
