"""Largest allowed values of settings: the largest published value times a wide margin.

Their products fit a float64.
"""

from __future__ import annotations

MAX_INT64 = 2**63 - 1
"""The largest whole number that a database column and a tensor hold: the bound of seeds."""
MAX_FLOAT = 1e18
"""Absolute value of a real number; its square still is a float32 (below 3.4e38)."""
MAX_LAYERS = 4096
"""Blocks; published networks have up to 1,000 (DeepNet)."""
MAX_WIDTH = 2**20
"""Channels of a vector; published networks have up to 20,480 (Megatron-Turing NLG)."""
MAX_RATIO = 1024
"""Ratio of two widths; published ones are up to 8."""
MAX_HEADS = 2**14
"""Heads of a layer; published networks have up to 128."""
MAX_VOCABULARY = 2**24
"""Tokens of a tokenizer; published ones have up to 256,000."""
MAX_TAPS = 2**16
"""Taps of a convolution; published causal ones beside attention have up to 128."""
MAX_ITERATIONS = 1000
"""Rounds of an iteration such as Newton-Schulz; published ones are up to 12."""
MAX_TOKENS = 10**15
"""Tokens of a training or a split; published trainings have up to 4e13. A float64 counts them exactly (below 2^53)."""
MAX_LENGTH = 2**30
"""Tokens of a row, an optimizer step or a context; published contexts have up to 1e7 tokens, steps up to 1e8."""
MAX_WRITTEN = 2**20
"""Tokens of a text that a model writes; the cache of their keys and values is allocated at once."""
MAX_COMPUTED_ROW = 2**17
"""Tokens of a row that a corpus computes; published ones have up to 2^13. Its fingerprint makes 64 rows in memory."""
MAX_SHOTS = 1000
"""Solved examples before a question; published ones have up to 32."""
MAX_COUNT = 10**9
"""Rows, sequences, trials and documents; the largest shipped number is 1,600,000."""
MAX_DIGITS = 1000
"""Digits of a number that is to be recalled; published ones have up to 7."""
MAX_CPUS = 2**16
"""Cores of a machine; the largest machines have about 2,000."""
MAX_WATTS = 10**6
"""Watts of a GPU; the largest take about 1,400."""
MAX_GIB = 2**30
"""Memory in GiB; the largest machines have about 2^16."""
MAX_MINUTES = 10 * 366 * 24 * 60
"""Minutes of ten years."""
MAX_VALUES = 1000
"""Members of a list."""
