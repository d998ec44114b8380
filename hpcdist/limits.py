"""The size limits that several modules share; used as attributes of this module, so that tests can lower them."""

PIECE = 2**30  # bytes of a message at most
WINDOW = 2**26  # bytes of the memory through which data are copied: from files, and between a GPU and the host
MAX_DIMS = 64  # torch's own limit
