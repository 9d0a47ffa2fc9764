"""What a launch would do: which cells, in which order, on which text, with how much disk."""
