"""What each mechanism of the pipeline buys."""
