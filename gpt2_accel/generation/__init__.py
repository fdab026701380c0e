"""Text generation: sampling, conversations, and the pages of the demo."""
