"""What runs left behind: their history, and what it tells about them. No torch."""
