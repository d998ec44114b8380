"""The ways that data can take between the ranks of a team."""
