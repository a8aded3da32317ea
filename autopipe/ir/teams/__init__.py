"""Teams: the axes that their members shard, and what they exchange."""
