"""The ranks of a call: groups, teams, and how the ranks of a job find each other."""
