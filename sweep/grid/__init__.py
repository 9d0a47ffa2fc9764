"""A grid file to cells: its keys, reading and checking, expansion, and the identity of a cell.

May import model, results and, of sweep, config, data, probes, host and errors; planning, orchestrator and commands import it.
Start at grid_file.py, which declares every key of a grid, and grid.py, which reads a file and expands it.
"""
