"""Everything that touches weights: store, loader, runner, attention, sampling."""
