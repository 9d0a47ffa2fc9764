"""From a grid file to finished cells: grids, plans, executors, attempts, probes.

Imported by: cli; may import model, kernels and results.
Start at grid/grid.py (a file becomes cells), then planning/planner.py and orchestrator/launch.py.
"""
