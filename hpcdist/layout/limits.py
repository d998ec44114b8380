"""The size limits that several modules share; used as attributes of this module, so that tests can lower them."""

PIECE = 2**30  # bytes of a message at most
WINDOW = 2**26  # bytes of the memory through which data are copied: from files, and between a GPU and the host
INLINE = 192  # bytes of data at most that travel in a rank's header
HEADERS = 2**20  # bytes of the headers of all ranks; where they would be more, less data travel in them
MAX_DIMS = 64  # torch's own limit
