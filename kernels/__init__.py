"""One operation a file, with its naive reference; knows nothing of the rest of the project."""
