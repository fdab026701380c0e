"""Text generation: sampling with a key-value cache."""
