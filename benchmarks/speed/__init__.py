"""How fast training in stages is, with its peers interleaved in one run (``make bench``)."""
