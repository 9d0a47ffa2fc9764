"""When further seeds are enough: rules that a grid states, looks at what is there so far, and the levels that keep them honest."""
