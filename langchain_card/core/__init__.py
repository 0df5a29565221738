"""The protocol: pure, standard library only."""
