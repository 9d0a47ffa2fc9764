"""Grid files and cells: keys, reading and checking, expansion, and the identity of a cell.

May import model, results and, of sweep, config, data, probes, host and errors.
Imported by: planning, orchestrator and commands.
Start at grid_file.py, which declares every key of a grid, and grid.py, which reads a file and expands it.
"""
