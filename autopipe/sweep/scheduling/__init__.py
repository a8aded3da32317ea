"""Which job runs on which device: a pure function, and its simulator."""
