"""The shipped grids, their bases and the JSON Schema of a grid file."""
