"""Stage 3: acceptance length and speed, measured; the release folder."""
