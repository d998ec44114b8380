"""The command ``python -m hpcdist.convert``: all tensors of a file or folder, in another format."""
