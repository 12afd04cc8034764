"""The harness: one rule, one test (HA-1 to HA-7)."""
