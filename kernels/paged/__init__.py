"""Attention of one new token per text over keys and values in pages: the ops and their Triton kernels.

Imported by: model/kv_cache.py, the mixers while they decode, sweep/bench.
Start at page_tables.py, then op.py; single_query.py serves mixers without a kernel.
"""
