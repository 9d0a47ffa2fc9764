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
    "train.constant": "0.3",
    "train.distractor": "False",
    "train.embedding_lr": "0.3",
    "train.head_lr": "0.003125",
    "train.loss_on": "all",
    "train.loss_reduction": "mean",
    "train.muon_lr": "0.02",
    "train.optimizer": "muon",
    "train.regularizer": "baseline",
    "train.scalar_lr": "0.01",
    "train.schedule": "cosine",
    "train.warmup_steps": "0",
}
"""By dotted path, as text."""
