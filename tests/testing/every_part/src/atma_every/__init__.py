"""Parts of each kind for atma-sweep."""

from atma_sweep.reports.report_spec import ReportSpec
from atma_sweep.sweep.executors.registry import ExecutorSpec

SIZE_LIST = ReportSpec("reports:size_list", "number of parameters", takes=(), package="atma_every")
SIZE_PLOT = ReportSpec("size_plot", "number of parameters", takes=(), package="atma_every")
ALONE = ExecutorSpec("alone:AloneExecutor", "this machine, one attempt at a time", package="atma_every")
