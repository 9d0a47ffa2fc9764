"""A figure: the half-life of each configuration."""

import pandas as pd

from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import collected
from atma_sweep.reports.number_format import column_of
from atma_sweep.reports.sweep_data import ReportError
from atma_sweep.reports.table_builder import measured_entry


def collect(store, data):
    """Return mixer and half-life of each configuration that has one."""
    column = column_of("half_life", data.metric("half_life", "tokens"))
    entries = [(cells[0], measured_entry(data, cells, column)) for cells in data.configurations().values()]
    entries = [(cell, entry) for cell, entry in entries if entry.value is not None]
    if not entries:
        raise ReportError(f"no cell of sweep {data.sweep} has a half-life; evaluate with --probe half_life")
    frame = pd.DataFrame([{"mixer": cell.levels["attn_type"], "tokens": entry.value} for cell, entry in entries])
    origins = [pair for _, entry in entries for pair in entry.origins]
    return collected(store, data, "half-life", "Half-life of the fading mean", frame, origins)


def draw(data, look):
    """Draw one point per configuration."""
    figure = drawing.page(drawing.PANEL_HEIGHT, drawing.width_of(1))
    axes = figure.subplots()
    axes.plot(data.frame["mixer"], data.frame["tokens"], linestyle="none", marker="o", color=drawing.GREY)
    axes.set_ylabel("half-life, tokens")
    return drawing.finished(figure, data.title, data.notes, {})
