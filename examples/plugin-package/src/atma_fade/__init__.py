"""Parts for atma-sweep; each is imported when a grid or a command uses it."""

from atma_sweep.reports.report_spec import ReportSpec

HALF_LIVES = ReportSpec(
    "table:half_lives", "half-life of the fading mean", takes=(), probes=("half_life",), package="atma_fade"
)
HALF_LIFE = ReportSpec("figure", "half-life of the fading mean", takes=(), probes=("half_life",), package="atma_fade")
