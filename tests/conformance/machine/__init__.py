"""A machine of several actors that calls the real use cases on a real database; see `rules`."""
