# A corpus of your own: text that a program makes. Its file's hash is part of every cell's id, so an edit makes new cells.
#
#     atma-sweep launch examples/corpus/pairs.yaml && atma-sweep report --table 6
#
# `atma-sweep data prepare pairs --plugin examples/corpus/pairs.py` prepares the text alone.
import random

from atma_sweep.sweep.data import CorpusKind, Text, register_corpus


@register_corpus("pairs")
class Pairs(CorpusKind):
    description = "letters, each with its number, and the letters once more"

    @classmethod
    def texts(cls, data):
        for number in range(2000):
            draw = random.Random(number)
            pairs = "".join(f"{letter}{draw.randrange(10)} " for letter in "abcdefgh" * 20)
            yield Text(f"pairs/{number}", pairs + pairs)
