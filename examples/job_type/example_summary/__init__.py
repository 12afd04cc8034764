"""Example job type `example_summary`: a text in, its title and summary out."""
