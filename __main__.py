"""Entry point of `python -m atma_sweep`, the same as the command atma-sweep."""

from .cli import main

if __name__ == "__main__":
    main()
