"""Commands that need more than one call: parse, call one function, print."""
