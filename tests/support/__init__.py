"""What several tests share: cases, oracles, and commands in a folder of their own."""
