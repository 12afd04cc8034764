"""What builds, checks, runs and ships the project; nothing in here is imported by a service."""
