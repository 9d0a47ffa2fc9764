"""Figure as PGF code for LaTeX, written without a TeX engine: the document that includes it sets the texts in its font."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ...results.console.text import tex_escaped
from ..sweep_data import ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = (
    r"% needs \usepackage{pgf} in the preamble; include it with \input{FILE.pgf}",
    r"\begingroup\makeatletter\begin{pgfpicture}",
)
FOOT = r"\end{pgfpicture}\makeatother\endgroup"


def pgf_content(figure: Figure, trace: str | None, name: str) -> bytes:
    """Return a figure with its final layout as PGF code, with the trace in its first line, a comment.

    Matplotlib's own writer measures texts with a TeX engine. Here they have the sizes of the layout's font, which is
    wider than those of most documents, so that nothing comes to overlap.

    Args:
        figure: The figure, inside `drawing.settings`.
        trace: Text of the trace, one line; None leaves it out.
        name: Name of the figure, for the message alone.

    Raises:
        ReportError: The figure has raster parts, such as a heat map.
    """
    import matplotlib
    from matplotlib.backends.backend_mixed import MixedModeRenderer

    out = io.StringIO()
    width, height = figure.get_size_inches()
    rectangle = rf"\pgfpathrectangle{{\pgfpointorigin}}{{\pgfqpoint{{{width:f}in}}{{{height:f}in}}}}"
    head = [*([f"% {trace}"] if trace else []), *HEAD, rectangle, r"\pgfusepath{use as bounding box, clip}"]
    out.write("\n".join(head) + "\n")
    with matplotlib.rc_context({"pgf.rcfonts": False}):
        renderer: Any = MixedModeRenderer(figure, width, height, figure.dpi, _renderer(figure, out))
        try:
            figure.draw(renderer)
        except ValueError as error:
            if "raster" not in str(error):
                raise
            raise ReportError(f"figure {name} has raster parts, which PGF cannot hold; write it as pdf") from error
    return (out.getvalue() + FOOT + "\n").encode()


def _renderer(figure: Figure, out: io.StringIO) -> Any:
    """Return a PGF renderer that measures texts like the layout did, and escapes them for LaTeX.

    Args:
        figure: The figure, whose canvas is Agg's.
        out: Receives the code.
    """
    from matplotlib.backends.backend_pgf import RendererPgf

    measuring = figure.canvas.get_renderer()  # type: ignore[attr-defined]

    class Renderer(RendererPgf):
        """PGF renderer without a TeX engine."""

        def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
            """Return (width, height, descent) of a text in pixels, as Agg measures it."""
            width, height, descent = measuring.get_text_width_height_descent(s, prop, ismath)
            return width, height, descent

        def draw_text(
            self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
        ) -> None:
            """Write a text, escaped unless it is a formula."""
            super().draw_text(gc, x, y, s if ismath else tex_escaped(s), prop, angle, ismath, mtext)

    return Renderer(figure, out)


def pgf_trace(content: bytes) -> str | None:
    """Return the text of the first line, a comment; None if it is none or not UTF-8."""
    try:
        first = content.decode().partition("\n")[0]
    except UnicodeDecodeError:
        return None
    return first.removeprefix("% ") if first.startswith("% ") else None
