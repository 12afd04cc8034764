"""What an author of job types uses in tests."""
