"""What a report refuses."""

from __future__ import annotations

from ..results.errors import Expected


class ReportError(Expected):
    """A report that cannot be made as asked."""
