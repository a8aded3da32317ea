"""What runs in a call: the user's functions, what they reach by name, and the files that they read and change."""
