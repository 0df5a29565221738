"""A contest of this engine with other ways to use a draft model, on a virtual clock."""
