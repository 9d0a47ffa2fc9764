# A probe of your own: a measurement of every trained model, which reports then show like the built-in ones.
#
#     atma-sweep launch examples/probe/measured.yaml
#     sqlite3 atma.db "SELECT slug, length, value FROM results WHERE metric = 'gain'"
#
# Cells that were trained before the probe was asked for are not trained again: the launch evaluates their weights.
from atma_sweep.sweep.probes import Metric, Probe, register_probe


@register_probe("repetition")
class Repetition(Probe):
    """Loss of a passage read a second time, minus its loss the first time: negative where the model copies."""

    metrics = (
        Metric("gain", "nats", "lower", "Loss of a passage's repetition minus that of the passage.", "Repeat", 2),
    )
    by_length = True

    def tokens(self, length):
        # read at this context length; a plan estimates the cost from it
        return self.config.eval.documents * length

    def longest(self, corpus):
        return 2 * min(map(len, corpus.heldout), default=0)

    def run(self, subject, lengths):
        import torch  # not at the top: a plan reads this file, and needs no torch

        for length in lengths:
            half = length // 2
            passages_BT = torch.tensor([document[:half].tolist() for document in subject.documents])
            twice_BT = torch.cat([passages_BT, passages_BT], 1)
            losses_BT = subject.losses(twice_BT[:, :-1], twice_BT[:, 1:])
            # the target after the first passage is the first token of the second, which nothing announces
            gain = losses_BT[:, half:].mean() - losses_BT[:, : half - 1].mean()
            yield [self.value("gain", float(gain), length, n=len(passages_BT))], []
