"""Studies: trials that are proposed one after the other, from the results of those before."""
