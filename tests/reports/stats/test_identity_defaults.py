"""Identity defaults in reports equal those of the config classes."""

from atma_sweep.model.config import ModelConfig
from atma_sweep.reports.stats.audit import flatten_config
from atma_sweep.reports.stats.sweep_differences import IDENTITY_DEFAULTS
from atma_sweep.results.names import PUBLISHED
from atma_sweep.results.paper.published_sweeps import published_sweep
from atma_sweep.sweep.config import TrainConfig


def test_identity_defaults_equal_those_of_the_config() -> None:
    defaults = {}
    for section, cls in (("model", ModelConfig), ("train", TrainConfig)):
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and "identity" in extra and extra["identity"] == field.default:
                defaults[f"{section}.{name}"] = str(extra["identity"])
    recorded = {
        path for name in PUBLISHED for cell in published_sweep(name).cells for path in flatten_config(cell.config)
    }
    assert {path: value for path, value in defaults.items() if path in recorded} == IDENTITY_DEFAULTS
