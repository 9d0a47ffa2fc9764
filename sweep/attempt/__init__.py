"""Attempts: the process that trains or loads one model, probes it and records every number.

May import grid, probes, training, data, checkpoints, external_models and host; knows no executor and no plan.
Start reading at main.py (the process), then cell_runner.py; failures.py classifies failures and chooses the reaction.
"""
