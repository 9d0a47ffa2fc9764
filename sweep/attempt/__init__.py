"""Attempts: the process that trains or loads one model, probes it and records every number."""
