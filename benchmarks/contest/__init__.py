"""The engine against other ways to use a draft, on a virtual clock."""
