"""Sources of text: recipes, files, a reader for each format, transforms."""
