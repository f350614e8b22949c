"""Stage 2: DeepSpeed trains drafts on the shards."""
