"""The page of a sweep served on this machine alone, which takes newer numbers over while the sweep runs."""
