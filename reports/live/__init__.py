"""A sweep as it goes: `status`, `show`, `status --watch`. Imports neither torch, ray nor pandas."""
