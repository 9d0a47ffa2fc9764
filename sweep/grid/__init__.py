"""From a YAML file to cells: reading, checking, expanding; what a cell is and what its id is taken of."""
