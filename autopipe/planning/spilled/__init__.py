"""Plans whose stages take turns on one device: their bytes, the seconds of their copies, and the search for cuts."""
