"""Settings that a stored config leaves out, and what leaving them out means.

A config of one's own is stored without the settings that stand at their identity default, a literal that never changes once a
setting has it. Reports know no config classes; here are those literals of the settings that published sweeps record.
"""

from __future__ import annotations

from collections.abc import Mapping

LEFT_OUT: Mapping[str, str] = {
    "model.attn_every": "4",
    "model.attn_offset": "2",
    "model.memory": "none",
    "model.mlp": "relu2",
    "model.mlp_ratio": "4",
    "model.positions": "none",
    "model.window": "False",
    "train.distractor": "False",
    "train.loss_on": "all",
    "train.loss_reduction": "mean",
    "train.optimizer": "muon",
    "train.regularizer": "baseline",
    "train.schedule": "cosine",
}
"""By dotted path, as text."""
