"""atma-sweep: a YAML grid of sequence mixers goes in, the finished ablation appendix comes out."""

__version__ = "0.1.0"
