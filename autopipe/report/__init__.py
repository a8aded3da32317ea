"""Plan, Profile, Timeline and results -> what people read. Pure: nothing here prints or reads a file."""
