"""Files as one process reads and writes them: bytes at offsets, and names that are replaced atomically."""
