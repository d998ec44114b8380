"""The verbs that all ranks of a group call together."""
