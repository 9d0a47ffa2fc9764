"""A figure."""

import pandas as pd
from atma_sweep.reports.figures.canvas import drawing
from atma_sweep.reports.figures.canvas.base import collected
from atma_sweep.reports.number_format import column_of
from atma_sweep.reports.table_builder import measured_entry


def collect(store, data):
    """Return the number of parameters of each configuration."""
    column = column_of("sizes", data.metric("sizes", "count"))
    entries = [measured_entry(data, cells, column) for cells in data.configurations().values()]
    frame = pd.DataFrame([{"index": index, "count": entry.value} for index, entry in enumerate(entries)])
    origins = [pair for entry in entries for pair in entry.origins]
    return collected(store, data, "size-plot", "Number of parameters", frame, origins)


def draw(data, look):
    """Draw one point per configuration."""
    figure = drawing.page(drawing.PANEL_HEIGHT, drawing.width_of(1))
    axes = figure.subplots()
    axes.plot(data.frame["index"], data.frame["count"], "o", color=drawing.GREY)
    return drawing.finished(figure, data.title, data.notes, {})
