"""A sweep as it goes: `status`, `show`, `status --watch`, and its page served to this machine. Imports neither torch, ray nor pandas."""
