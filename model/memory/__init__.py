"""Recurrent memories beside the core, one file each."""
