"""The reduced ZeRO-3 gradient as this rank's flat slices."""
