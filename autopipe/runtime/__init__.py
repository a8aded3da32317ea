"""The runtime of a rank: executes the instructions of a schedule with the code of the stage files."""
