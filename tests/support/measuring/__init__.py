"""What the tests of measurement share."""
