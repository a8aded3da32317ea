"""The user's model: found in its file, built, and measured before it is built."""
