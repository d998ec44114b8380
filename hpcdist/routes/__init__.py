"""Routes: communication libraries that move data between the ranks of a team."""
