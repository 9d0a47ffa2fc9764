"""Models from elsewhere, with weights that anybody may load: found, checked, and measured by the probes of our own cells."""
