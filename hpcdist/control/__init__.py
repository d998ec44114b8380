"""Small values between the ranks, never data."""
