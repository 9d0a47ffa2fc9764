"""The plan of a launch: which cells, in which order, at what cost, on which machine, text and disk.

May import grid, probes, training, data, checkpoints and host; knows no executor and starts nothing.
Imported by: orchestrator, commands, bench and doctor.
Start reading at planner.py, then ordering.py, admission.py (what is missing) and cost_estimate.py (what it costs).
"""
