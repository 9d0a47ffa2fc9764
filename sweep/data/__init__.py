"""From text to rows of tokens: sources, tokenizers, prepared corpora, batches."""
