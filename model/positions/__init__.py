"""Position schemes at the embedding, one file each."""
