"""Commands around a job; none runs inside a call."""
