"""The ranks of a call: groups and teams; and the rendezvous of a job's ranks."""
