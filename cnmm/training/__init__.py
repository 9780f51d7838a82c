"""Training a mixture: configuration, recipes, the loop and its parts."""
