"""Stage 1: the frozen target's hidden states over dialogues, as Arrow shards."""
