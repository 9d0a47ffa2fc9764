"""The plan of a launch: cells, their order, cost and machine, and checks of text and disk.

May import grid, probes, training, data, checkpoints and host; knows no executor and starts nothing. Imported by:
orchestrator, commands, bench and doctor. Start reading at planner.py, then ordering.py, admission.py (missing
resources) and cost_estimate.py (price).
"""
