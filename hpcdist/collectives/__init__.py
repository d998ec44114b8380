"""Collective operations: the verbs that all ranks of a group call together."""
