"""The n-gram drafter, which proposes what followed the same tokens before."""
