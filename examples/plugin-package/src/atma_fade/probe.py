"""A probe: the half-life that the setting `keep` gives a value."""

import math

from atma_sweep.sweep.probes import Metric, Probe


class HalfLife(Probe):
    """Tokens after which a value counts half; only for the mixer `fade`."""

    metrics = (Metric("tokens", "tokens", "higher", "Half-life of a value.", "Half-life", 1),)

    def tokens(self, length):
        """Return the validation tokens that the probe reads: none."""
        return 0

    def run(self, subject, lengths):
        """Yield the half-life, or the reason why there is none."""
        if self.config.model.attn_type != "fade":
            yield [self.missing("n/a: the mixer does not fade")], []
            return
        keep = self.config.model.mixers["fade"]["keep"]
        yield [self.value("tokens", math.log(0.5) / math.log(keep), n=1)], []
