"""From a grid file to finished cells."""
