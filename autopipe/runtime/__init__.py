"""Stage files and a schedule into trained weights: the loop over instructions, and what it stands on."""
