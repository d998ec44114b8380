"""Is a call right: on this rank, and on all ranks together?"""
