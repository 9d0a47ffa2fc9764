"""Products of a few rows with a matrix, which cost what reading the matrix does."""
