"""The size limits that several modules share; used as attributes of this module, so that tests can lower them."""

PIECE = 2**30  # bytes of a message at most
WINDOW = 2**26  # bytes of the memory through which data are copied: from files, and between a GPU and the host
INLINE = 960  # bytes of data at most that travel in a header; on 2 ranks, 192 would save 0.1 to 0.7 us
IN_LARGE_TEAM = 192  # the same where the headers of all ranks would have more than SHORT bytes
SHORT = 2**14
HEADERS = 2**20  # bytes of the headers of all ranks; where they would be more, less data travel in them
MAX_DIMS = 64  # torch's own limit
