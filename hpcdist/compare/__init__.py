"""The command ``python -m hpcdist.compare``: time what people write by hand beside this package, for given shapes."""
