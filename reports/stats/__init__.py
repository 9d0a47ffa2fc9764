"""What is worked out from measured numbers: effects, intervals, whether cells may be compared."""
