"""Models and model files for the tests, by what they are for."""
