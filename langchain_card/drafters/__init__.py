"""Where candidates come from: one file a drafter."""
