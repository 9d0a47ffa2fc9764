"""A launch from its plan to its end: the supervisor, retries, logs, and what people ask of it meanwhile."""
