"""A probe and a corpus."""

from atma_sweep.sweep.data import CorpusKind, Text
from atma_sweep.sweep.probes import Metric, Probe


class Sizes(Probe):
    """Number of parameters."""

    metrics = (Metric("count", "1", "lower", "Number of parameters.", "Parameters", 0),)

    def tokens(self, length):
        """Return the validation tokens that the probe reads: none."""
        return 0

    def run(self, subject, lengths):
        """Yield the number of parameters."""
        yield [self.value("count", sum(weight.numel() for weight in subject.model.parameters()), n=1)], []


class Multiples(CorpusKind):
    """The multiples of a hundred numbers."""

    description = "the multiples of a hundred numbers, a document each"

    @classmethod
    def texts(cls, data):
        """Yield one text per number."""
        for base in range(1, 101):
            yield Text(f"multiples/{base}", " ".join(str(base * times) for times in range(500)))
