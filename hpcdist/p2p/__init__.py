"""send and recv: structures from one rank to another."""
