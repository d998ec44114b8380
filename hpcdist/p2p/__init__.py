"""Point-to-point operations: send and receive structures."""
