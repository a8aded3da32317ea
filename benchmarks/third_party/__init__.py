"""Models of public repositories, their code unmodified, through ``autopipe check``."""
